"""RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021). https://arxiv.org/abs/2104.09864

    (x_c, x_{c + D/2}) at position t  →  turned by the angle t · base^(−2c / D),   c = 0 … D/2 − 1

so that q·k depends on the distance of the two only. Component c is paired with c + D/2, as in Llama; the paper pairs
neighbours, which is the same up to the order of components.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spanformer.position.base import Places, Position


class Rotary(Position):
    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary positions turn pairs of components, so it must be even")
        if not base > 0:
            raise ValueError(f"base is {base}; expected a positive number")
        self.head_dim, self.base = head_dim, base
        self._table: tuple[Tensor, Tensor] | None = None

    def turn(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
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
        """x [B, H, T, D] alone, at positions [T] or [B, T]: for keys that are kept turned, beside new queries."""
        return self.turner(lambda: positions, x.dtype)(x)

    def turner(self, positions: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        at = positions()
        cos, sin = self._angles(at, dtype)
        if at.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        return lambda x: _rotate(x, cos, sin)

    def _first(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions 0 … at least length − 1, kept from call to call; both [at least length, D]."""
        wide = torch.promote_types(like.dtype, torch.float32)
        kept = self._table
        if kept is None or len(kept[0]) < length or kept[0].dtype != wide or kept[0].device != like.device:
            with torch.inference_mode(False):  # a table made while generating must serve training too
                enough = 1 << (length - 1).bit_length()
                kept = self._table = self._angles(torch.arange(enough, device=like.device), wide)
        return kept

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [...] → cos and sin [..., D] in float32 or wider; the first half of sin is negative."""
        # Angles in float64: in float32 those of position 10 million are off by up to half a radian.
        component = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float64)
        angle = positions[..., None] * self.base ** (-component / self.head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, base={self.base:g}"


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) → (a cos − b sin, b cos + a sin) for the halves a and b of x, in two passes and a copy."""
    if x.shape[-1] != cos.shape[-1]:
        raise ValueError(f"heads have size {x.shape[-1]}; these rotary positions are made for {cos.shape[-1]}")
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)
