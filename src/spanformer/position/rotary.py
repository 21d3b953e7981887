"""RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021). https://arxiv.org/abs/2104.09864

    (x_c, x_{c + D/2}) at position t  →  rotated by the angle t · base^(−2c / D),   c = 0 … D/2 − 1

so that q·k depends only on the distance between the two. Component c is paired with c + D/2, as in Llama; the paper
pairs neighbours, which is the same up to the order of components.

For texts longer than a model was trained on, by `factor`, the angles are scaled:
    linear   t / factor                               (Chen et al., 2023), https://arxiv.org/abs/2306.15595
    ntk      base · factor^(D / (D − 2)): the fastest pairs stay, the slowest are scaled as in linear
    yarn     fast pairs (at least 32 turns in the trained length) stay, slow ones (at most 1 turn) are scaled as in
linear,
             others are interpolated; q and k are multiplied by 0.1 · ln factor + 1    (YaRN; Peng et al., 2023, §3)
             https://arxiv.org/abs/2309.00071

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from spanformer.kinds import PositionSpec
from spanformer.position.base import Encode, Places, Position

Scaling = Literal["none", "linear", "ntk", "yarn"]
FAST, SLOW = 32, 1  # turns within the trained length, as YaRN's authors set them


class Rotary(Position):
    """factor and trained (the length a model was trained on, for yarn only) need a scaling."""

    def __init__(
        self, head_dim: int, base: float = 10000.0, *, scaling: Scaling = "none", factor: float = 1.0, trained: int = 0
    ) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(
                f"head_dim is {head_dim}; expected an even number, because rotary positions rotate pairs of components"
            )
        if not base > 0:
            raise ValueError(f"base is {base}; expected a positive number")
        if scaling not in get_args(Scaling):
            raise ValueError(f"scaling is {scaling!r}; expected one of {', '.join(get_args(Scaling))}")
        if not factor >= 1 or (scaling == "none" and factor != 1):
            raise ValueError(
                f"factor is {factor} with scaling {scaling!r}; expected at least 1, and exactly 1 without scaling"
            )
        if (trained < 1) == (scaling == "yarn"):
            raise ValueError(
                f"trained is {trained} with scaling {scaling!r}; expected the training length with scaling 'yarn', and "
                "none otherwise"
            )
        if scaling == "yarn" and base <= 1:
            raise ValueError(f"base is {base}; yarn needs a base above 1, so that some pairs rotate slower than others")
        if scaling == "ntk" and head_dim < 4:
            raise ValueError(f"head_dim is {head_dim}; ntk scaling needs at least 4: a fast pair and a slow one")
        self.head_dim, self.base, self.scaling, self.factor, self.trained = head_dim, base, scaling, factor, trained
        self.length = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        """the factor of rotated queries and keys"""
        self._table: tuple[Tensor, Tensor] | None = None

    @classmethod
    def build(cls, spec: PositionSpec) -> Rotary:
        return cls(
            spec.head_dim, spec.base, scaling=spec.scaling, factor=spec.factor,
            trained=spec.length if spec.scaling == "yarn" else 0,
        )  # fmt: skip

    def encode(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        if view.q_positions is not None and view.k_positions is not None:
            return self.rotate(q, view.q_positions), self.rotate(k, view.k_positions)
        tq, tk = q.shape[2], k.shape[2]
        length = max(tq, tk)  # both end at the same token
        cos, sin = self._first(length, q)
        return (
            _rotate(q, cos[length - tq : length], sin[length - tq : length]),
            _rotate(k, cos[length - tk : length], sin[length - tk : length]),
        )

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, D] alone, at positions [T] or [B, T]: for keys of a KV cache, beside new queries."""
        return _rotate(x, *self._at(positions, x.dtype))

    def encode_at(self, positions: Callable[[], Tensor], dtype: torch.dtype, heads: list[int] | None = None) -> Encode:
        cos, sin = self._at(positions(), dtype)
        return lambda q, k: (_rotate(q, cos, sin), _rotate(k, cos, sin))

    def _at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for positions [T] or [B, T], which broadcast with [B, H, T, D]."""
        cos, sin = self._angles(positions, dtype)
        return (cos[:, None], sin[:, None]) if positions.ndim == 2 else (cos, sin)

    def _first(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … length − 1 or more, cached between calls; both [at least length, D]."""
        wide = torch.promote_types(like.dtype, torch.float32)
        table = self._table
        if table is None or len(table[0]) < length or table[0].dtype != wide or table[0].device != like.device:
            with torch.inference_mode(False):  # a table made while generating must also work in training
                enough = 1 << (length - 1).bit_length()
                table = self._table = self._angles(torch.arange(enough, device=like.device), wide)
        return table

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] → cos and sin [..., D] in float32 or wider; the first half of sin is negative."""
        # Angles in float64: in float32 the error at position 10 million is up to half a radian.
        angle = positions[..., None] * self.speeds(positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = (angle.cos() * self.length).to(wide), (angle.sin() * self.length).to(wide)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def speeds(self, device: torch.device | None = None) -> Tensor:
        """[D/2] the angle by which each pair rotates from one token to the next, in float64."""
        d, base = self.head_dim, self.base
        if self.scaling == "ntk":
            base = base * self.factor ** (d / (d - 2))
        speed = base ** (-torch.arange(0, d, 2, device=device, dtype=torch.float64) / d)
        if self.scaling == "linear":
            return speed / self.factor
        if self.scaling == "yarn":
            fast, slow = (self._pair_with(turns) for turns in (FAST, SLOW))
            fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
            pair = torch.arange(d // 2, device=device, dtype=torch.float64)
            stretched = ((pair - fast) / max(slow - fast, 0.001)).clamp(0, 1)  # the weight of linear scaling
            return speed * (1 - stretched) + speed / self.factor * stretched
        return speed

    def _pair_with(self, turns: float) -> float:
        """The (fractional) index of the pair that makes this many turns within the trained length."""
        return self.head_dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def extra_repr(self) -> str:
        scaled = "" if self.scaling == "none" else f", scaling={self.scaling!r}, factor={self.factor:g}"
        trained = f", trained={self.trained}" if self.trained else ""
        return f"head_dim={self.head_dim}, base={self.base:g}{scaled}{trained}"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves a and b of x, in two passes and a copy."""
    if x.shape[-1] != cos.shape[-1]:
        raise ValueError(
            f"the head size is {x.shape[-1]}; expected {cos.shape[-1]}, for which these rotary positions were made"
        )
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
