"""The launches of the backward pass: at most three kernels and two sums, whatever the terms are.

Shapes: B batch, H query heads, Hkv key/value heads, Tq and Tk tokens, D and Dv head sizes, L entries of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.backends.base import fold_by_key
from spanformer.ops.backends.triton.launch import Call, Terms, kernel, laid, on_device, output, strides
from spanformer.ops.backends.triton.tiles import power


class Gradients(NamedTuple):
    """What the kernels leave; None where not wanted, or where the term is absent."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    key_bias: Tensor | None
    rows: Tensor | None
    """[1 or 2, H], or [1 or 2, B, H, Tq] if each query has a span: of spans and sink logits (`split_rows`)"""


def run_backward(
    call: Call, out: Tensor | None, lse: Tensor, g_out: Tensor, g_lse: Tensor | None, wanted: Sequence[bool]
) -> Gradients:
    """out None: g_lse already holds g_lse − g_out·out. wanted: of q, k, v and `Terms`."""
    if call.shape.empty:
        return _nothing(call, g_lse, wanted)
    g_out, g_lse = laid(g_out), None if g_lse is None else g_lse.contiguous()
    dq, delta, rows = _queries(call, out, lse, g_out, g_lse)
    dk = dv = by_key = None
    if wanted[1] or wanted[2] or wanted[5]:
        dk, dv, by_key = _keys(call, lse, g_out, delta, wanted[5])
    dbias = _bias(call, lse, g_out, delta) if wanted[4] else None
    if by_key is not None and call.terms.key_bias is not None:
        by_key = fold_by_key(by_key, call.terms.key_bias)
    if rows is not None and not call.dynamic:
        rows = rows.sum((1, 3))
    return Gradients(dq, dk, dv, dbias, by_key, rows)


def split_rows(rows: Tensor | None, terms: Terms) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the span and of the sink logits."""
    span, sink_logits = terms.span, terms.sink_logits
    if rows is None or (span is None and sink_logits is None):
        return None, None
    dsink = None if sink_logits is None else rows[-1].sum((0, 2)) if rows.ndim == 4 else rows[-1]
    return None if span is None else rows[0], dsink


def _queries(call: Call, out, lse, g_out, g_lse) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq, δ [B, H, Tq], and what each row gives its span and its sink logit, [1 or 2, B, H, Tq]."""
    s, terms = call.shape, call.terms
    options, tile = call.constants("backward_q")
    dq, delta = output(call.q, call.q), torch.empty_like(lse)
    count = sum(t is not None for t in (terms.span, terms.sink_logits))
    rows = lse.new_empty((count, *lse.shape)) if count else None
    dspan = None if terms.span is None or rows is None else rows[0]
    dsink = None if terms.sink_logits is None or rows is None else rows[-1]
    of_out = strides(g_out if out is None else out)
    with on_device(call.q):
        kernel("backward_q")[(s.batch * s.heads * -(-s.queries // tile.queries),)](
            call.q, call.k, call.v, out, g_out, lse, g_lse, dq, delta, dspan, dsink, *call.tensors(),
            terms.sink_logits, *call.ids, *call.integers(), *call.strides(), *of_out, *strides(g_out), *strides(dq),
            call.fixed.scale, call.fixed.ramp, HEADS=power(s.heads), **options,
        )  # fmt: skip
    return dq, delta, rows


def _keys(call: Call, lse, g_out, delta, bias: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """dk, dv and, if wanted, the gradient of key biases [B, H, Tk]."""
    s = call.shape
    options, tile = call.constants("backward_kv")
    dk, dv = output(call.k, call.k), output(call.v, call.v)
    by_key = lse.new_empty((s.batch, s.heads, s.keys)) if bias else None
    with on_device(call.q):
        kernel("backward_kv")[(s.batch * s.kv_heads * -(-s.keys // tile.keys),)](
            call.q, call.k, call.v, g_out, lse, delta, dk, dv, by_key, *call.tensors(), *call.ids, *call.integers(),
            *call.strides(), *strides(g_out), *strides(dk), *strides(dv), call.fixed.scale, call.fixed.ramp,
            HEADS=power(s.kv_heads), **options,
        )  # fmt: skip
    return dk, dv, by_key


def _bias(call: Call, lse, g_out, delta) -> Tensor:
    """[H, L]"""
    assert call.terms.bias is not None
    options, _ = call.constants("backward_bias")
    dbias = torch.empty_like(call.terms.bias, dtype=torch.float32)
    options = {name: value for name, value in options.items() if name not in ("BN", "PRECISION")}
    with on_device(call.q):
        kernel("backward_bias")[(dbias.numel(),)](
            call.q, call.k, call.v, g_out, lse, delta, dbias, *call.tensors(), *call.ids[2:], *call.integers(),
            *call.strides(), *strides(g_out), call.fixed.scale, call.fixed.ramp, **options,
        )  # fmt: skip
    return dbias


def _nothing(call: Call, g_lse: Tensor | None, wanted: Sequence[bool]) -> Gradients:
    """Without pairs only sink logits have a gradient: they are lse."""
    terms, s = call.terms, call.shape

    def zeros(t: Tensor | None, want: bool) -> Tensor | None:
        return torch.zeros_like(t) if t is not None and want else None

    count, rows = sum(t is not None for t in (terms.span, terms.sink_logits)), None
    if count:
        rows = call.q.new_zeros((count, s.batch, s.heads, s.queries), dtype=torch.float32)
        if terms.sink_logits is not None and g_lse is not None:
            rows[-1] = g_lse
        rows = rows if call.dynamic else rows.sum((1, 3))
    dk, dv = zeros(call.k, wanted[1]), zeros(call.v, wanted[2])
    by_term = zeros(terms.bias, wanted[4]), zeros(terms.key_bias, wanted[5])
    return Gradients(torch.zeros_like(call.q), dk, dv, by_term[0], by_term[1], rows)
