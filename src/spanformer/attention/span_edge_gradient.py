"""The gradient of a span at its two edges, as the code of Sukhbaatar et al. (2019) has it.

A span of a whole number of tokens has m = 1 exactly at distance z and m = 0 exactly at z + R. The derivative of
m = clip((R + z − d) / R, 0, 1) is not defined there; `attend` uses 0, their clamp 1 / R. Spans start at 0 and are
clamped to 0, so this case is common: this gradient moves a span away from 0. The keys at both edges add to ∂z:

    Σ_t exp(s_t − lse_t) · (g_t·v − g_t·out_t + g_lse_t) / R

Shapes: B batch, H heads, Hkv key/value heads, T queries, Tk keys, D and Dv head sizes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spanformer.ops import Attended, Rule, kernel


def with_span_edge_gradient(found: Attended, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Attended:
    """`found` unchanged: attend's result for queries that are the last T keys, by a rule with `paper_compat`
    and static spans; its backward pass also gives whole-number spans their gradient at the edges."""
    assert rule.paper_compat and rule.span is not None and not rule.dynamic
    assert rule.distance_value is None and rule.distance_scale is None
    if not (torch.is_grad_enabled() and rule.span.requires_grad):
        return found
    tables = [None if t is None else t.detach() for t in (rule.distance_bias, rule.distance_vec)]
    qkv = (t.detach() for t in (q, k, v))
    out, lse = _SpanEdgeGradient.apply(*found, rule.span, *qkv, *tables, rule.ramp, rule.reach_list())
    return Attended(out, lse)


class _SpanEdgeGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out, lse, span, q, k, v, bias, tables, ramp: float, cap: list[int]):
        ctx.save_for_backward(out, lse, span, q, k, v, bias, tables)
        ctx.ramp, ctx.cap = ramp, cap
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx, g_out, g_lse):
        out, *saved = ctx.saved_tensors  # read once: a recomputed activation can be unpacked only once
        lse, span, q, k, v, bias, tables = saved
        given = torch.zeros_like(out) if g_out is None else g_out
        if q.device.type == "cpu" and q.dtype in kernel.DTYPES and kernel.problem() is None:
            grad = _native(q, k, v, out, lse, given, g_lse, span, bias, tables, ctx.cap, ctx.ramp)
            return g_out, g_lse, grad, *([None] * 7)
        mass = torch.zeros_like(lse) if g_lse is None else g_lse
        mass = mass - (given * out).sum(-1).to(lse.dtype)
        grad = torch.zeros_like(span)
        for far in (0.0, ctx.ramp):
            grad += _at(saved, far, ctx.cap, given, mass) / ctx.ramp
        return g_out, g_lse, grad, *([None] * 7)


def _native(q, k, v, out, lse, g_out, g_lse, span, bias, tables, cap: list[int], ramp: float) -> Tensor:
    """[H] the same by the compiled kernel, several times as fast."""
    q, k, v, out, g_out = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v, out, g_out))
    g_lse = None if g_lse is None else g_lse.float().contiguous()
    reach = torch.tensor(cap)
    lse, span = lse.float().contiguous(), span.detach()
    found = kernel.run_span_edge_gradient(q, k, v, out, lse, g_out, g_lse, span, bias, tables, reach, ramp)
    return found.to(span.dtype)


def _at(saved: list, far: float, cap: list[int], g_out: Tensor, mass: Tensor) -> Tensor:
    """[H] R times the gradient through the keys at distance z + far (counted from the previous token), for heads where
    that is a whole number below their cap."""
    lse, span, q, k, v, bias, tables = saved
    (_, h, t, d), tk = q.shape, k.shape[2]
    shared = h // k.shape[1]
    distance = span.detach() + far
    index = distance.round().long()
    whole = (distance == index) & (index < torch.tensor(cap, device=span.device).clamp(max=1 << 60))
    index = torch.where(whole, index, 0)
    place = torch.arange(tk - t - 1, tk - 1, device=q.device) - index[:, None]  # [H, T]
    there = whole[:, None] & (place >= 0)
    head = (torch.arange(h, device=q.device) // shared)[:, None]
    alike = q.device.type == "cpu" and shared == 1 and bool((index == index[0]).all()) and int(place[0, 0]) >= 0
    if alike:  # a slice instead of a gather: all spans are equal, for example 0
        first = int(place[0, 0])
        keys, values = k[:, :, first : first + t], v[:, :, first : first + t]
    else:
        keys, values = (x[:, head, place.clamp(min=0)] for x in (k, v))  # [B, H, T, D]
    if tables is not None:
        rows = tables.expand(h, -1, -1)[torch.arange(h, device=q.device), index.clamp(max=tables.shape[1] - 1)]
        keys = keys + rows[:, None].to(q.dtype)
    score = (q * keys).sum(-1).to(lse.dtype) / math.sqrt(d)
    if bias is not None:
        score = score + bias.gather(1, index[:, None].clamp(max=bias.shape[1] - 1)).to(lse.dtype)
    weight = torch.exp(score - lse)
    weight = torch.where(there & (lse > -math.inf), weight, 0.0)
    gain = (g_out * values).sum(-1).to(lse.dtype) + mass
    return (weight * gain).sum((0, 2)).to(span.dtype)
