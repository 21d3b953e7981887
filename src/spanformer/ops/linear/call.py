"""One call of linear attention, checked and in one form: all that its paths accept.

Shapes: B batch, H query heads, Hkv key/value heads, T tokens, m features, Dv size of values.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearState(NamedTuple):
    """What linear attention remembers of a text, float32 (float64 where the inputs are).

    s [B, Hkv, m, Dv] = Σ_j e^(G − G_j) b_j v_jᵀ and z [B, Hkv, m] = Σ_j e^(G − G_j) b_j, with G the sum of the
    log-decays up to the newest token and G_j up to token j.
    """

    s: Tensor
    z: Tensor


class Divide(NamedTuple):
    """What the numerator of a row is divided by."""

    by: Literal["sum", "clamped", "rms"] = "sum"
    """the denominator; the denominator or eps, whichever is larger; the numerator's root mean square"""
    eps: float = 0.0
    """rows whose denominator is smaller give zeros and −inf; the least denominator; added to the mean square"""


BY_SUM = Divide()


class LinearCall(NamedTuple):
    """Padding is already removed: b and v are 0 there, and so is the decay."""

    a: Tensor
    """[B, H, Tq, m] features of queries: of the last Tq tokens with `near`, of all without"""
    b: Tensor
    """[B, Hkv, T, m] features of keys"""
    v: Tensor
    """[B, Hkv, T, Dv]"""
    decay: Tensor | None
    """[1 or B, Hkv, 1 or T] logarithms, at most 0"""
    near: Tensor | None
    """[1 or B, H, 1 or Tq]: the weight of a pair at distance d is multiplied by clip((d − near) / ramp, 0, 1)"""
    ramp: float
    starts: Tensor | None
    """[B, T] bool, True where a document begins: the state is emptied before that token"""
    state: LinearState | None
    divide: Divide | None
    """return out and lse; None: numerator and denominator"""
    elu: bool = False
    """a and b are queries and keys; their features are elu + 1"""

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums."""
        return torch.promote_types(self.v.dtype, torch.float32)

    def with_features(self) -> LinearCall:
        """The same call with features in the place of queries and keys, for paths that do not make them, and a decay
        [B, Hkv, T]."""
        call = self if self.decay is None else self._replace(decay=self.decay.expand(self.b.shape[:3]))
        if not self.elu:
            return call
        a, b = (F.elu(t.to(self.wide)) + 1 for t in (self.a, self.b))
        return call._replace(a=a, b=b, elu=False)

    def initial(self) -> LinearState:
        """The state before the first token; zeros if none was given."""
        if self.state is not None:
            return LinearState(self.state.s.to(self.wide), self.state.z.to(self.wide))
        b, kv, _, m = self.b.shape
        s = self.v.new_zeros((b, kv, m, self.v.shape[3]), dtype=self.wide)
        return LinearState(s, s.new_zeros((b, kv, m)))


def make_call(
    a: Tensor, b: Tensor, v: Tensor, decay: Tensor | None, state: LinearState | None, *,
    documents: Tensor | None, padding: Tensor | None, near: Tensor | None, ramp: float, divide: Divide | None,
    elu: bool = False,
) -> LinearCall:  # fmt: skip
    _check_features(a, b, v, far=near is not None)
    (rows, heads, queries, _), (_, kv, tokens, _) = a.shape, b.shape
    if decay is not None:
        decay = _check_decay(decay, rows, kv, tokens)
    if near is not None:
        near = _check_near(near, ramp, rows, heads, queries)
    if state is not None:
        _check_state(state, b, v)
    if padding is not None:
        padding = _check_padding(padding, rows, kv, tokens)
        hidden = padding[..., None]
        b, v = b.masked_fill(hidden, -math.inf if elu else 0), v.masked_fill(hidden, 0)  # elu(−∞) + 1 is 0
        decay = None if decay is None else decay.expand(rows, kv, tokens).masked_fill(padding, 0)
    starts = None
    if documents is not None:
        if tuple(documents.shape) != (rows, tokens):
            raise ValueError(f"documents has shape {list(documents.shape)}; expected [{rows}, {tokens}]")
        starts = torch.zeros(documents.shape, dtype=torch.bool, device=documents.device)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return LinearCall(a, b, v, decay, near, float(ramp), starts, state, divide, elu)


def _check_features(a: Tensor, b: Tensor, v: Tensor, *, far: bool) -> None:
    if a.ndim != 4 or b.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"a, b and v have shapes {list(a.shape)}, {list(b.shape)} and {list(v.shape)}; expected [B, H, T, m], "
            "[B, Hkv, T, m] and [B, Hkv, T, Dv]"
        )
    if a.shape[2] == 0:
        raise ValueError("a has 0 tokens; expected at least 1")
    fits = a.shape[2] <= b.shape[2] if far else a.shape[2] == b.shape[2]
    if not fits or (a.shape[0], a.shape[3]) != (b.shape[0], b.shape[3]) or b.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"a has shape {list(a.shape)}, b {list(b.shape)} and v {list(v.shape)}; expected the same batch, tokens "
            "and features, and as many heads in b as in v"
        )
    if b.shape[1] == 0 or a.shape[1] % b.shape[1]:
        raise ValueError(f"a has {a.shape[1]} heads; expected a multiple of b's {b.shape[1]}")
    if not a.dtype == b.dtype == v.dtype or not a.is_floating_point():
        raise ValueError(f"a, b and v are {a.dtype}, {b.dtype} and {v.dtype}; expected one floating-point dtype")
    if not a.device == b.device == v.device:
        raise ValueError(f"a, b and v are on {a.device}, {b.device} and {v.device}; expected one device")


def _check_decay(decay: Tensor, rows: int, kv: int, tokens: int) -> Tensor:
    if decay.ndim != 3 or decay.shape[1] != kv or decay.shape[0] not in (1, rows) or decay.shape[2] not in (1, tokens):
        raise ValueError(f"decay has shape {list(decay.shape)}; expected [1 or {rows}, {kv}, 1 or {tokens}]")
    return decay.to(torch.promote_types(decay.dtype, torch.float32))


def _check_near(near: Tensor, ramp: float, rows: int, heads: int, tokens: int) -> Tensor:
    near = near[None, :, None] if near.ndim == 1 else near
    if near.ndim != 3 or near.shape[1] != heads or near.shape[0] not in (1, rows) or near.shape[2] not in (1, tokens):
        raise ValueError(
            f"near has shape {list(near.shape)}; expected [{heads}] or [1 or {rows}, {heads}, 1 or {tokens}]"
        )
    if not 0 < ramp < float("inf"):
        raise ValueError(f"ramp is {ramp}; expected a number above 0 beside `near`")
    return near.to(torch.promote_types(near.dtype, torch.float32))


def _check_state(state: LinearState, b: Tensor, v: Tensor) -> None:
    s, z = (*b.shape[:2], b.shape[3], v.shape[3]), (*b.shape[:2], b.shape[3])
    if tuple(state.s.shape) != s or tuple(state.z.shape) != z:
        raise ValueError(
            f"state has s {list(state.s.shape)} and z {list(state.z.shape)}; expected {list(s)} and {list(z)} for "
            "these features and values"
        )
    wide = torch.promote_types(v.dtype, torch.float32)
    if state.s.dtype != wide or state.z.dtype != wide:
        raise ValueError(f"state is {state.s.dtype} and {state.z.dtype}; expected {wide} beside inputs of {v.dtype}")


def _check_padding(padding: Tensor, rows: int, kv: int, tokens: int) -> Tensor:
    """[B, 1 or Hkv, T]"""
    padding = padding[:, None] if padding.ndim == 2 else padding
    if padding.dtype != torch.bool:
        raise ValueError(f"padding has dtype {padding.dtype}; expected torch.bool, True where a token is padding")
    if padding.ndim != 3 or tuple(padding.shape) not in ((rows, 1, tokens), (rows, kv, tokens)):
        raise ValueError(
            f"padding has shape {list(padding.shape)}; expected [{rows}, {tokens}] or [{rows}, {kv}, {tokens}]"
        )
    return padding
