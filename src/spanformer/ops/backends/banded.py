"""Attention in plain PyTorch whose time and memory follow each head's reach, on any device and in any float dtype.

    s_ij = scale · (q_i·k_j + q_i·r[d]) + b[d] + c_j + log m_ij     P_ij = exp(s_ij − lse_i)
    dS_ij = P_ij · (dP_ij − δ_i + dlse_i)        δ_i = Σ_j P_ij·dP_ij       dz = Σ over the ramp of (dS_ij / m) / R
    with distance_scale, scale · (…) = x becomes relu(x)·f[d]:   dx = dS·f[d] where x > 0, df[d] = Σ dS·relu(x)

Queries are cut into chunks, and a chunk reads only the keys its heads reach (banded_plan); chunks whose windows slide
along with them are one batched product. No tensor of a window's size outlives its step: the backward pass recomputes
the weights from lse. A head of limit r costs O(Tq · (r + C) · D) time, and at most O(C · Tk) memory.
16-bit inputs are computed in float32, and their lse is float32.

A NaN or an infinity in a hidden key must not change the output, but 0 · NaN is NaN. So such numbers become 0
before products, and the weights of the pairs that do see them become NaN.

Shapes: B batch, H heads, Tq queries, Tk keys; h heads of a step, n chunks, C queries in a chunk, W keys in its window.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.backends.banded_plan import Plan, Step, make_plan
from spanformer.ops.backends.banded_tiles import (
    Learned,
    Sight,
    accumulate,
    add_k,
    kept,
    look,
    nan_rows,
    pick,
    put_q,
    sink_of,
    take_k,
    take_q,
    zeroed,
)
from spanformer.ops.backends.base import COMMON, Backend, refuse_second_derivative, unserved_derivatives, unserved_terms
from spanformer.ops.lower import Lowered


def attend_banded(call: Lowered) -> Attended:
    x = Learned(*(getattr(call, name) for name in Learned._fields))
    if not x.k.shape[2]:
        return _no_keys(x)
    return Attended(*_Banded.apply(make_plan(call), call.ids(), *x))


def _no_keys(x: Learned) -> Attended:
    out, lse = x.q.new_zeros(*x.q.shape[:3], x.v.shape[3]), x.q.new_full(x.q.shape[:3], -math.inf, dtype=_work(x))
    if x.sink_logits is not None:
        lse = torch.where(x.sink_logits[:, None] == -math.inf, lse, x.sink_logits[:, None].to(lse.dtype))
    nothing = sum(t.flatten()[:0].sum() for t in x if t is not None)  # 0: gives every term a gradient of zeros
    return Attended(out + nothing, lse + nothing)


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, ids: list[Tensor], *tensors) -> tuple[Tensor, Tensor]:
        x = Learned(*tensors)
        with _full_precision(x.q):
            out, lse = _forward(plan, x)
        ctx.plan = plan
        ctx.save_for_backward(*x, lse, *ids)  # the plan uses ids: autograd must refuse a backward pass if they change
        return out, lse

    @staticmethod
    def backward(ctx, g_out: Tensor, g_lse: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("banded")
        *tensors, lse = ctx.saved_tensors[: len(Learned._fields) + 1]
        x = Learned(*tensors)
        with _full_precision(x.q):
            grads = _backward(ctx.plan, x, lse, g_out, g_lse, Learned(*ctx.needs_input_grad[2:]))
        return (
            None,
            None,
            *(None if grad is None or t is None else grad.to(t.dtype) for t, grad in zip(x, grads, strict=True)),
        )


def _forward(plan: Plan, x: Learned) -> tuple[Tensor, Tensor]:
    work, clean = _work(x), _finite(x.v)
    out = x.q.new_empty(*x.q.shape[:3], x.v.shape[3])
    lse = x.q.new_empty(x.q.shape[:3], dtype=work)
    for step in plan.steps:
        seen, kv_heads = look(plan, x, step, work), _kv_heads(x, step)
        q, k, v = take_q(x.q, step).to(work), _keys(x.k, step, kv_heads, work), _keys(x.v, step, kv_heads, work)
        p = _products(plan, seen, q, k, _vectors(x, step, seen, work))
        p = seen.hide(_scores(seen, p), -math.inf)
        peak = p.amax(-1, keepdim=True)
        sink = sink_of(x, step, work)
        if sink is not None:
            peak = torch.maximum(peak, sink)
        peak = torch.where(peak == -math.inf, 0, peak)  # a row that sees no key
        total = p.sub_(peak).exp_().sum(-1, keepdim=True)
        if sink is not None:
            total = total + (sink - peak).exp()
        if plan.dropout:
            p.mul_(kept(plan, step)).div_(1 - plan.dropout)
        if not clean:
            p = seen.hide(p.add_(nan_rows(v).transpose(-1, -2)), 0)
            v = zeroed(v)
        put_q(out, step, p @ v / torch.where(total == 0, 1, total))
        put_q(lse[..., None], step, torch.where(total == 0, -math.inf, total.log() + peak))
    return out, lse


def _backward(
    plan: Plan, x: Learned, lse: Tensor, g_out: Tensor, g_lse: Tensor, needed: Learned
) -> list[Tensor | None]:
    work, heads = _work(x), len(plan.reach)
    tables = () if x.distance_vec is None else (x.distance_vec,)
    clean = _finite(x.q, x.k, x.v, g_out, g_lse, *tables) and bool((lse < math.inf).all())
    grads: dict[str, Tensor] = {}
    if needed.q:
        grads["q"] = torch.empty_like(x.q)
    for name in ("k", "v", "span", "distance_bias", "distance_vec", "distance_scale", "sink_logits"):
        if getattr(needed, name):
            grads[name] = torch.zeros_like(getattr(x, name), dtype=work)
    by_key = [name for name in ("key_bias", "key_span") if getattr(needed, name)]
    for name in by_key:  # collected per batch row and head, and summed to the term's shape at the end
        grads[name] = x.q.new_zeros(x.q.shape[0], heads, x.k.shape[2], 1, dtype=work)

    for step in plan.steps:
        seen, kv_heads = look(plan, x, step, work), _kv_heads(x, step)
        q, g = take_q(x.q, step).to(work), take_q(g_out, step).to(work)
        k, v = _keys(x.k, step, kv_heads, work), _keys(x.v, step, kv_heads, work)
        vectors = _vectors(x, step, seen, work)
        row_lse = take_q(lse[..., None], step)
        row_lse = torch.where(row_lse == -math.inf, 0, row_lse)
        nan_g = nan_v = None
        if not clean:
            nan_g, nan_v = nan_rows(g), nan_rows(v).transpose(-1, -2)
            q, k, v, g = zeroed(q), zeroed(k), zeroed(v), zeroed(g)
            vectors = None if vectors is None else zeroed(vectors)

        raw = _products(plan, seen, q, k, vectors)
        positive = None if seen.factor is None else raw.clamp(min=0)
        p = seen.hide(_scores(seen, raw).sub_(row_lse), -math.inf).exp_()
        ds = g @ v.transpose(-1, -2)
        keep = kept(plan, step).to(work).div_(1 - plan.dropout) if plan.dropout else None
        if keep is not None:
            ds.mul_(keep)
        if nan_g is not None and nan_v is not None:
            seen.hide(ds.add_(nan_g).add_(nan_v), 0)
        # δ from the same numbers as dP, not from out: where one key has all the weight they cancel exactly
        less = ds.mul_(p).sum(-1, keepdim=True) - take_q(g_lse[..., None], step)  # δ − dlse
        ds.addcmul_(p, less, value=-1)
        if not clean:
            seen.hide(ds, 0)
        if needed.v:
            p = p if keep is None else p.mul_(keep)
            p = p if nan_g is None else seen.hide(p.add_(nan_g), 0)
            add_k(grads["v"], step, kv_heads, p.transpose(-1, -2) @ g)
        sink = sink_of(x, step, work)
        if needed.sink_logits and sink is not None:
            of_sink = -(sink - row_lse).exp() * less
            accumulate(grads["sink_logits"][None], step.heads, of_sink.sum((0, 2, 3, 4))[None])
        _term_gradients(step, x, seen, ds, grads)
        if positive is not None and seen.factor is not None:
            if needed.distance_scale:
                _add_by_distance(grads["distance_scale"], step, seen, seen.distances.collect(ds * positive))
            ds.mul_(seen.factor).masked_fill_(positive <= 0, 0)
        q = q * plan.scale
        if needed.k:
            add_k(grads["k"], step, kv_heads, ds.transpose(-1, -2) @ q)
        dq = ds @ k if needed.q else None
        if vectors is not None and (needed.q or needed.distance_vec):
            by_row = seen.distances.to_queries(ds)  # [B, h, n, C, rows]
            dq = None if dq is None else dq.add_(by_row @ vectors)
            if needed.distance_vec:
                of_rows = (by_row.transpose(-1, -2) @ q).sum((0, 2))[None]  # [1, h, rows, D]
                _add_rows(grads["distance_vec"], step, seen, of_rows)
        if dq is not None:
            put_q(grads["q"], step, dq.mul_(plan.scale))

    for name in by_key:
        rows, shared, _ = getattr(x, name).shape
        total = grads[name][..., 0].unflatten(1, (shared, -1)).sum(2)
        grads[name] = total.sum(0, keepdim=True) if rows == 1 else total
    return [grads.get(name) for name in Learned._fields]


def _products(plan: Plan, seen: Sight, q: Tensor, k: Tensor, vectors: Tensor | None) -> Tensor:
    """[B, h, n, C, W]: scale · (q·k + q·r[d])."""
    q = q * plan.scale
    products = q @ k.transpose(-1, -2)
    if vectors is not None:
        products += seen.distances.from_queries(q @ vectors.transpose(-1, -2))
    return products


def _scores(seen: Sight, scores: Tensor) -> Tensor:
    """The scores, in place: products with distance terms and biases, before masking."""
    if seen.factor is not None:
        scores.clamp_(min=0).mul_(seen.factor)
    for bias in seen.biases:
        scores += bias
    return scores


def _term_gradients(step: Step, x: Learned, seen: Sight, ds: Tensor, grads: dict[str, Tensor]) -> None:
    """Spans, distance bias and key bias: sums of ds."""
    if "key_bias" in grads:
        add_k(grads["key_bias"], step, step.heads, ds.sum(-2)[..., None])
    if "key_span" in grads and seen.key_slope is not None:
        add_k(
            grads["key_span"],
            step,
            step.heads,
            torch.where(seen.key_slope == 0, 0, ds * seen.key_slope).sum(-2)[..., None],
        )
    slope, dynamic = seen.slope if "span" in grads else None, x.span is not None and x.span.ndim == 3
    if slope is not None and dynamic:
        put_q(grads["span"][..., None], step, torch.where(slope == 0, 0, ds * slope).sum(-1, keepdim=True))
    if "distance_bias" in grads or (slope is not None and not dynamic):
        by_distance = seen.distances.collect(ds)  # heads on axis 1, other axes as in the distances
        if slope is not None and not dynamic:
            total = torch.where(slope == 0, 0, by_distance * slope).sum((0, 2, 3, 4))
            accumulate(grads["span"][None], step.heads, total[None])
        if "distance_bias" in grads and grads["distance_bias"].shape[1]:
            _add_by_distance(grads["distance_bias"], step, seen, by_distance)


def _add_by_distance(table: Tensor, step: Step, seen: Sight, by_distance: Tensor) -> None:
    """Add the result of `collect` to the gradient of a table [H, L]."""
    rows = seen.distances.entry.clamp(0, table.shape[1] - 1).flatten().expand(len(step.heads), -1)
    part = table.new_zeros(len(step.heads), table.shape[1]).scatter_add_(1, rows, by_distance.movedim(1, 0).flatten(1))
    accumulate(table[None], step.heads, part[None])


def _vectors(x: Learned, step: Step, seen: Sight, work: torch.dtype) -> Tensor | None:
    """[1, 1 or h, 1, rows, D]: the rows of distance_vec that the step's distances read."""
    if x.distance_vec is None or not x.distance_vec.shape[1]:
        return None
    rows = seen.distances.table_rows(x.distance_vec.shape[1])
    return pick(x.distance_vec[None].index_select(2, rows), step.heads).to(work)[:, :, None]


def _add_rows(grad: Tensor, step: Step, seen: Sight, of_rows: Tensor) -> None:
    """Add of_rows [1, h, rows, D] to the gradient of distance_vec, [1 or H, L, D]."""
    rows = seen.distances.table_rows(grad.shape[1])
    if grad.shape[0] == 1:
        grad[0].index_add_(0, rows, of_rows[0].sum(0))
    else:
        for i, head in enumerate(step.heads):
            grad[head].index_add_(0, rows, of_rows[0, i])


def _keys(t: Tensor, step: Step, heads: tuple[int, ...], work: torch.dtype) -> Tensor:
    """Overlapping windows are copied once, for all products with them."""
    tile = take_k(t, step, heads).to(work)
    return tile.contiguous() if step.chunks > 1 else tile


def _kv_heads(x: Learned, step: Step) -> tuple[int, ...]:
    return tuple(h * x.k.shape[1] // x.q.shape[1] for h in step.heads)


def _work(x: Learned) -> torch.dtype:
    return _wide(x.q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite, by a sum; a sum that overflows only costs the slow path. Never called on an
    accelerator, where it would be a sync."""
    return all(t.device.type == "cpu" and math.isfinite(t.sum(dtype=_wide(t.dtype))) for t in tensors)


def _full_precision(t: Tensor) -> contextlib.AbstractContextManager:
    """No autocast: it would compute the float32 products of 16-bit inputs in 16 bits again."""
    available = torch.amp.is_autocast_available(t.device.type)
    return torch.autocast(t.device.type, enabled=False) if available else contextlib.nullcontext()


# The plan depends on numbers read from the spans, so it cannot be traced.
_untraced = cast(Callable[[Lowered], Attended], torch.compiler.disable(attend_banded))
_unserved = unserved_terms(Lowered, "banded", (*COMMON, "distance_scale", "key_span", "orders"))


def _refuses(call: Lowered) -> list[str]:
    return [*_unserved(call), *unserved_derivatives("banded", call)]


BACKEND = Backend("banded", unusable=lambda: [], refuses=_refuses, run=_untraced)
