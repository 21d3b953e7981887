"""The compiled CPU kernel, loaded once, and its arguments, packed in the order of the tables in c_layout.py."""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from spanformer.ops import c_layout
from spanformer.ops.library import Library, find, load
from spanformer.ops.rule import Rule

if TYPE_CHECKING:
    from spanformer.ops.decode.held import Rings

log = logging.getLogger("spanformer")

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_SIZE = 256
CALL, DECODE = c_layout.CALL.struct, c_layout.DECODE.struct
STEP = c_layout.DECODE.until("span")  # the first fields of a `Decode`, which change from token to token

_library: Library | None = None
_problem: str | None = None


def problem() -> str | None:
    """Why the kernel cannot be loaded here, or None. If SPANFORMER_KERNEL names a missing library, this raises
    a ValueError: its user wants that library, not another backend."""
    global _library, _problem
    if _library is None and _problem is None:
        path = find()
        try:
            _library = load(path)
        except (OSError, AttributeError, RuntimeError) as error:
            if os.environ.get("SPANFORMER_KERNEL"):
                raise ValueError(f"SPANFORMER_KERNEL is '{path}', which cannot be loaded: {error}") from error
            _problem = str(error)
            if path.exists():  # a kernel that was never built was reported at installation
                log.warning(f"backend 'native' is not available: {_problem}")
    return _problem


def library() -> Library:
    """The loaded kernel; raises if there is none."""
    if _library is None and problem():
        raise RuntimeError(f"the native kernel is not available: {_problem}")
    assert _library is not None
    return _library


class Fixed(NamedTuple):
    """The arguments of a call that have no gradient."""

    scale: float
    ramp: float
    dropout: float
    causal: bool
    shift: int
    max_future: int
    reach: Tensor | None  # [H] int64
    seed: Tensor | None  # [1] int64
    q_positions: Tensor | None  # [1 or B, T] int64, like the next three
    k_positions: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    q_orders: Tensor | None  # [E, 1 or B, T] int64
    k_orders: Tensor | None
    block_size: int
    block_offsets: Tensor | None
    block_columns: Tensor | None
    block_mask_ids: Tensor | None
    block_masks: Tensor | None
    drop_heads: Tensor | None  # see `Numbers` in ops/lower/call.py; with dropout only
    drop_queries: Tensor | None
    drop_keys: Tensor | None

    def ids(self) -> tuple[Tensor | None, ...]:
        """The tensors from q_positions on, without block_size."""
        return (*self[8:14], *self[15:])

    def with_ids(self, ids: Sequence[Tensor | None]) -> Fixed:
        return Fixed(*self[:8], *ids[:6], self.block_size, *ids[6:])  # pyright: ignore[reportCallIssue]


class Terms(NamedTuple):
    """The rule's learned terms in the kernel's form: float32, contiguous."""

    span: Tensor | None  # [H] or [B, H, Tq]
    distance_bias: Tensor | None  # [H, L]
    distance_vec: Tensor | None  # [1 or H, L, D]
    key_bias: Tensor | None  # [1 or B, 1 or Hkv or H, Tk]
    sink_logits: Tensor | None  # [H]
    key_span: Tensor | None = None  # [1 or B, 1 or H, Tk]


_NO_ROWS = (0, 0, 0, 0)
_NO_GRADIENTS = (*_NO_ROWS, *_NO_ROWS, *_NO_ROWS, *_NO_ROWS, 0, 0, 0, 0, 0, 0, 0)


def pack_call(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, terms: Terms, fixed: Fixed, gradients: tuple[int, ...]
) -> bytes:
    """The bytes of a `Call`; its last fields are the gradients, or `_NO_GRADIENTS`."""
    (b, h, tq, d), (_, hkv, tk, dv) = q.shape, v.shape
    head = (
        DTYPES[q.dtype],
        torch.get_num_threads(),
        b,
        h,
        hkv,
        tq,
        tk,
        d,
        dv,
        fixed.causal,
        fixed.shift,
        fixed.max_future,
    )
    tensors = (*rows(q), *rows(k), *rows(v), *rows(out), lse.data_ptr())
    return CALL.pack(*head, fixed.scale, fixed.ramp, fixed.dropout, *tensors, *_rule(h, terms, fixed), *gradients)


def _rule(h: int, terms: Terms, fixed: Fixed) -> tuple[int, ...]:
    """The fields from `reach` to `seed`."""
    span, bias, vec, key, sink_logits, key_span = terms
    return (
        _ptr(fixed.reach),
        _ptr(span), span is not None and span.ndim == 3,
        _ptr(bias), bias.shape[1] if bias is not None else 0,
        *_vectors(vec),
        *((key.data_ptr(), key.stride(0) if key.shape[0] > 1 else 0, key.stride(1), h // key.shape[1])
          if key is not None else (0, 0, 0, 1)),
        *((key_span.data_ptr(), *(key_span.stride(n) if key_span.shape[n] > 1 else 0 for n in (0, 1)))
          if key_span is not None else (0, 0, 0)),
        *_pair(fixed.q_positions, fixed.k_positions),
        *_pair(fixed.q_documents, fixed.k_documents),
        *_orders(fixed.q_orders, fixed.k_orders),
        _ptr(sink_logits),
        *_blocks(fixed),
        _ptr(fixed.seed),
        _ptr(fixed.drop_heads), *_pair(fixed.drop_queries, fixed.drop_keys),
    )  # fmt: skip


def _vectors(vec: Tensor | None) -> tuple[int, int, int]:
    """Address, length, and stride between heads (0 if they share one table)."""
    return (0, 0, 0) if vec is None else (vec.data_ptr(), vec.shape[1], vec.stride(0) if vec.shape[0] > 1 else 0)


def _blocks(fixed: Fixed) -> tuple[int, ...]:
    offsets = fixed.block_offsets
    if offsets is None:
        return (0, 0, 0, 0, 0, 0, 0)
    per_head = offsets.stride(0) if offsets.shape[0] > 1 else 0
    pointers = (_ptr(fixed.block_columns), _ptr(fixed.block_mask_ids), _ptr(fixed.block_masks))
    return (offsets.data_ptr(), *pointers, fixed.block_size, offsets.shape[1] - 1, per_head)


def _pair(q: Tensor | None, k: Tensor | None) -> tuple[int, int, int, int]:
    if q is None or k is None:
        return _NO_ROWS
    return (q.data_ptr(), k.data_ptr(), q.stride(0) if q.shape[0] > 1 else 0, k.stride(0) if k.shape[0] > 1 else 0)


def _orders(q: Tensor | None, k: Tensor | None) -> tuple[int, ...]:
    if q is None or k is None:
        return (0, 0, 0, 0, 0, 0, 0)
    strides = [s for t in (q, k) for s in (t.stride(0), t.stride(1) if t.shape[1] > 1 else 0)]
    return (q.data_ptr(), k.data_ptr(), q.shape[0], *strides)


def rows(t: Tensor) -> tuple[int, int, int, int]:
    """A [B, heads, T, size] tensor: its address and the strides of its first three axes."""
    b, h, t_, _ = t.stride()
    return (t.data_ptr(), b, h, t_)


def as_float(t: Tensor | None) -> Tensor | None:
    """A learned term in the kernel's form: float32, contiguous."""
    if t is None or (t.dtype == torch.float32 and t.is_contiguous() and not t.is_neg()):
        return t
    return as_laid(t.detach().to(torch.float32))


def as_laid(t: Tensor) -> Tensor:
    """Contiguous, and without torch's lazy negation (as in `x.conj().imag`)."""
    return t.resolve_neg().contiguous()


def _ptr(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def run_forward(q: Tensor, k: Tensor, v: Tensor, terms: Terms, fixed: Fixed) -> tuple[Tensor, Tensor]:
    """out [B, H, Tq, Dv] laid out like q, and lse [B, H, Tq] float32."""
    b, h, tq, d = q.shape
    dv = v.shape[3]
    out = torch.empty_like(q) if d == dv else q.new_empty((b, h, tq, dv))
    lse = q.new_empty((b, h, tq), dtype=torch.float32)
    library().forward(pack_call(q, k, v, out, lse, terms, fixed, _NO_GRADIENTS))
    return out, lse


class Gradients(NamedTuple):
    """Gradients in the kernel's form: those of key_bias and key_span are always [B, H, Tk]."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Tensor | None
    distance_bias: Tensor | None
    distance_vec: Tensor | None
    key_bias: Tensor | None
    sink_logits: Tensor | None
    key_span: Tensor | None


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, g_out: Tensor, g_lse: Tensor | None,
    terms: Terms, fixed: Fixed, wanted: tuple[bool, ...],
) -> Gradients:  # fmt: skip
    """wanted: which of the learned terms need a gradient, in the order of `Terms`."""
    b, h, tk = *q.shape[:2], k.shape[2]
    dq = torch.empty_like(q, dtype=torch.float32)  # several segments add to one row: float32 until all have
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    made = [torch.empty_like(t) if t is not None and want else None for t, want in zip(terms, wanted, strict=True)]
    for n in (3, 5):  # key_bias and key_span
        if made[n] is not None:
            made[n] = torch.empty((b, h, tk), dtype=torch.float32)
    pointers = (_ptr(g_lse), *map(_ptr, made))
    gradients = (*rows(g_out), *rows(dq), *rows(dk), *rows(dv), *pointers)
    library().backward(pack_call(q, k, v, out, lse, terms, fixed, gradients))
    return Gradients(dq if q.dtype == torch.float32 else dq.to(q.dtype), dk, dv, *made)


def run_span_edge_gradient(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, g_out: Tensor, g_lse: Tensor | None, span: Tensor,
    bias: Tensor | None, vec: Tensor | None, reach: Tensor | None, ramp: float,
) -> Tensor:  # fmt: skip
    """[H] float32: the gradient of whole-number spans [H] at the ramp's edge, as the paper's code has it
    (attention/span_edge_gradient.py)."""
    none = (None, None, None, None)
    fixed = Fixed(
        1 / math.sqrt(q.shape[3]), ramp, 0.0, True, 1, 0, reach, None, *none, None, None, 0, *none, None, None, None
    )
    terms = Terms(as_float(span), as_float(bias), as_float(vec), None, None)
    found = torch.empty(q.shape[1], dtype=torch.float32)
    gradients = (*rows(g_out), *_NO_ROWS, *_NO_ROWS, *_NO_ROWS, _ptr(g_lse), _ptr(found), 0, 0, 0, 0, 0)
    library().span_edge_gradient(pack_call(q, k, v, out, lse, terms, fixed, gradients))
    return found


def pack_decode(
    dtype: torch.dtype, rings: Rings, where: tuple[Tensor, Tensor, Tensor, Tensor | None], rule: Rule, terms: Terms,
    scale: float, recent: tuple[ctypes.Array[ctypes.c_char], int, Tensor] | None,
) -> ctypes.Array[ctypes.c_char]:  # fmt: skip
    """A packed `Decode` for queries of this dtype. where: first slots, capacities, newest and oldest positions; recent:
    the packed call of `rings.recent`, its tokens and since. `run_decode` fills in the rest."""
    first, capacity, newest, oldest = where
    reach, span, bias, vec = rule.reach, terms.span, terms.distance_bias, terms.distance_vec
    assert reach is None or isinstance(reach, Tensor)
    keys, values, scales, (b, slots, _) = rings.keys, rings.values, rings.scales, rings.keys.shape
    near, tokens, since = recent or (None, 0, None)
    packed = ctypes.create_string_buffer(DECODE.size)
    DECODE.pack_into(
        packed, 0, *(0,) * 19,
        DTYPES[dtype], rings.bits, b, rule.heads, capacity.numel(), *rings.sizes, rule.paper_compat,
        rings.sink_tokens, scale, rule.ramp, keys.data_ptr(), keys.stride(0), 0, keys.stride(1),
        values.data_ptr(), values.stride(0), 0, values.stride(1),
        *((scales[0].data_ptr(), scales[1].data_ptr()) if scales else (0, 0)), slots,
        first.data_ptr(), capacity.data_ptr(), newest.data_ptr(), _ptr(oldest),
        _ptr(reach), span is not None and span.ndim == 3,
        _ptr(bias), bias.shape[1] if bias is not None else 0, *_vectors(vec), _ptr(terms.sink_logits),
        0 if near is None else ctypes.addressof(near), tokens, _ptr(since),
    )  # fmt: skip
    return packed


def run_decode(
    packed: ctypes.Array[ctypes.c_char], q: Tensor, new: tuple[Tensor, ...], span: Tensor | None, dv: int
) -> tuple[Tensor, Tensor]:
    """Attend from q [B, H, 1, D] to the rings of `packed`; write new keys and values [B, Hkv, 1, ·], if any, to them
    first."""
    b, h, _, _ = q.shape
    out, lse = q.new_empty((b, h, 1, dv)), q.new_empty((b, h, 1), dtype=torch.float32)
    fresh = (*rows(new[0]), *rows(new[1])) if new else (*_NO_ROWS, *_NO_ROWS)
    STEP.pack_into(
        packed, 0, torch.get_num_threads(), *rows(q), *rows(out), lse.data_ptr(), *fresh, _ptr(span)
    )  # fmt: skip
    library().decode(packed)
    return out, lse
