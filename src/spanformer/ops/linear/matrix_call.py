"""One call of attention with a matrix state and no normaliser, checked and in one form: all that its paths accept.

Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D size of keys, Dv of values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MatrixCall(NamedTuple):
    """Padding is already removed: k, v and beta are 0 there, and so is the decay."""

    q: Tensor
    """[B, H, T, D]"""
    k: Tensor
    """[B, Hkv, T, D]"""
    v: Tensor
    """[B, Hkv, T, Dv]"""
    beta: Tensor | None
    """[B, Hkv, T]; None: no delta rule"""
    decay: Tensor | None
    """logarithms, at most 0: [B, Hkv, T], or [B, Hkv, T, D] for one in each channel of the keys"""
    starts: Tensor | None
    """[B, T] bool, True where a document begins: the state is emptied before that token"""
    state: Tensor | None
    """[B, Hkv, D, Dv]"""

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and states."""
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def shared(self) -> int:
        """Query heads of each key/value head."""
        return self.q.shape[1] // self.k.shape[1]

    def initial(self) -> Tensor:
        """The state before the first token; zeros if none was given."""
        if self.state is not None:
            return self.state
        return self.v.new_zeros((*self.k.shape[:2], self.k.shape[3], self.v.shape[3]), dtype=self.wide)

    def finite(self) -> tuple[MatrixCall, Tensor, Tensor]:
        """The call with 0 for every NaN and infinity; which rows [B, H, T] saw one; which states [B, Hkv] did. A
        product by chunks would take 0 · NaN from a later token to an earlier one."""
        every = [self.q, self.k, self.v]
        gates = [t for t in (self.beta, self.decay) if t is not None]
        good = [t.isfinite() for t in (*every, *gates)]
        clean = [torch.where(g, t, 0) for g, t in zip(good, (*every, *gates), strict=True)]
        by_token = [g.all(3) if g.ndim == 4 else g for g in good[1:]]
        wrong = ~torch.stack(by_token).all(0)  # [B, Hkv, T]
        count = wrong.cumsum(2)
        if self.starts is not None:
            count = count - torch.where(self.starts[:, None], count - wrong.long(), 0).cummax(2).values
        seen = count > 0
        rest = iter(clean[3:])
        beta = None if self.beta is None else next(rest)
        decay = None if self.decay is None else next(rest)
        call = self._replace(q=clean[0], k=clean[1], v=clean[2], beta=beta, decay=decay)
        return call, seen.repeat_interleave(self.shared, 1) | ~good[0].all(3), seen[:, :, -1]


def make_call(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, decay: Tensor | None, state: Tensor | None, *,
    documents: Tensor | None, padding: Tensor | None,
) -> MatrixCall:  # fmt: skip
    _check_rows(q, k, v)
    (rows, _, tokens, size), kv = q.shape, k.shape[1]
    wide = torch.promote_types(v.dtype, torch.float32)
    if beta is not None:
        beta = _check_gates("beta", beta, (rows, kv, tokens), wide)
    if decay is not None:
        shape, name = ((rows, kv, tokens), "decay") if beta is not None else ((rows, kv, tokens, size), "gates")
        decay = _check_gates(name, decay, shape, wide)
    if state is not None:
        _check_state(state, (rows, kv, size, v.shape[3]), wide, v)
    if padding is not None:
        _check_ids("padding", padding, rows, tokens)
        if padding.dtype != torch.bool:
            raise ValueError(f"padding has dtype {padding.dtype}; expected torch.bool, True where a token is padding")
        k, v = hide(k, padding), hide(v, padding)
        beta, decay = (None if t is None else hide(t, padding) for t in (beta, decay))
    starts = None
    if documents is not None:
        _check_ids("documents", documents, rows, tokens)
        starts = torch.zeros(documents.shape, dtype=torch.bool, device=documents.device)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return MatrixCall(q, k, v, beta, decay, starts, state)


def hide(t: Tensor, padding: Tensor) -> Tensor:
    """[B, Hkv, T] or [B, Hkv, T, D] with 0 at padding."""
    return t.masked_fill(padding[:, None] if t.ndim == 3 else padding[:, None, :, None], 0)


def _check_rows(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"q, k and v have shapes {list(q.shape)}, {list(k.shape)} and {list(v.shape)}; expected [B, H, T, D], "
            "[B, Hkv, T, D] and [B, Hkv, T, Dv]"
        )
    if q.shape[2] == 0:
        raise ValueError("q has 0 tokens; expected at least 1")
    if (q.shape[0], q.shape[2], q.shape[3]) != (k.shape[0], k.shape[2], k.shape[3]) or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"q has shape {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)}; expected the same batch, tokens "
            "and size, and as many heads in k as in v"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads; expected a multiple of k's {k.shape[1]}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; expected one floating-point dtype")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; expected one device")


def _check_gates(name: str, gates: Tensor, shape: tuple[int, ...], wide: torch.dtype) -> Tensor:
    if tuple(gates.shape) != shape or not gates.is_floating_point():
        raise ValueError(
            f"{name} has shape {list(gates.shape)} and dtype {gates.dtype}; expected {list(shape)} of a floating-point "
            "dtype"
        )
    return gates.to(wide)


def _check_state(state: Tensor, shape: tuple[int, ...], wide: torch.dtype, v: Tensor) -> None:
    if tuple(state.shape) != shape:
        raise ValueError(f"state has shape {list(state.shape)}; expected {list(shape)} for these keys and values")
    if state.dtype != wide or state.device != v.device:
        raise ValueError(
            f"state is {state.dtype} on {state.device}; expected {wide} on {v.device} beside inputs of {v.dtype}"
        )


def _check_ids(name: str, ids: Tensor, rows: int, tokens: int) -> None:
    if tuple(ids.shape) != (rows, tokens):
        raise ValueError(f"{name} has shape {list(ids.shape)}; expected [{rows}, {tokens}]")
