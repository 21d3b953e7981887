"""The dense oracle: every pair of query and key, written from the equations, in any dtype.

    s_ij = scale · (q_i·k_j + q_i·r[d]) + b[d] + c_j + f_i − f_j          d = i − j
    a_ij = m_ij·exp(s_ij) / (exp(sink) + Σ_r m_ir·exp(s_ir))       m_ij = clip((R + z − d)/R, 0, 1), z of i or j
    out_i = Σ_j a_ij · (v_j + w[d])
    with distance_scale   s_ij = relu(scale · (q_i·k_j + q_i·r[d])) · f[d] + b[d] + c_j + f_i − f_j

It builds Tq × Tk tensors on purpose. Differentiable (twice, where torch is) in every term.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spanformer.ops import dropout as dropping
from spanformer.ops.backend import Backend, unserved_terms
from spanformer.ops.call import Attended, Call
from spanformer.ops.parts import union
from spanformer.ops.tables import ahead_of, entry


def products(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, Tq, Tk]"""
    return q @ k.transpose(-1, -2)


def attend_reference(call: Call, content: Callable[[Tensor, Tensor], Tensor] = products) -> Attended:
    """content: what the score of q [B, H, Tq, D] and k [B, H, Tk, D] begins with, before `scale`."""
    q, rule = call.q, call.rule
    group = q.shape[1] // call.k.shape[1]
    k, v = call.k.repeat_interleave(group, 1), call.v.repeat_interleave(group, 1)  # [B, H, Tk, ·]
    finite = bool(q.isfinite().all() and k.isfinite().all() and v.isfinite().all())
    score, visible = _scores(call, k, finite, content)
    part = call
    while part.rule.also is not None:  # one softmax over the pairs of all
        part = union(part)[1]
        more, seen = _scores(part, k, finite, content)
        if bool((seen & visible).any()):
            raise ValueError(
                "also sees pairs that the rule itself sees; they would be counted twice, so leave them out"
            )
        score, visible = torch.where(seen, more, score), visible | seen
    if not finite:
        v = torch.where(visible[..., None], v[:, :, None], 0)

    peak = (
        score.detach().amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*score.shape[:3], 1), -math.inf)
    )
    if rule.sinks is not None:
        sink = rule.sinks.to(q.dtype)[None, :, None, None]
        peak = torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -math.inf, 0, peak)  # a row that sees nothing
    weight = (score - peak).exp()
    total = weight.sum(-1, keepdim=True)
    if rule.sinks is not None:
        total = total + (sink - peak).exp()
    nothing = total == 0
    safe = torch.where(nothing, 1, total)
    lse = torch.where(nothing, -math.inf, safe.log() + peak)[..., 0]
    weight = weight / safe
    if call.dropout:
        weight = weight * kept_weights(call).to(q.dtype) / (1 - call.dropout)
    out = weight @ v if finite else (weight[..., None] * v).sum(-2)
    if rule.distance_value is not None:
        table, at = rule.distance_value.to(q.dtype), _index(call, rule.distance_value, ahead_of(rule, "distance_value"))
        by_entry = weight.new_zeros(*q.shape[:3], table.shape[1]).scatter_add(-1, at, weight)
        out = out + by_entry @ table
    return Attended(out, lse)


def _scores(call: Call, k: Tensor, finite: bool, content: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Scores by the call's rule, its `also` aside, −inf where it sees nothing, and where it sees: [B, H, Tq, Tk]."""
    q, rule = call.q, call.rule
    distance = distances(call)  # [1 or B, 1, Tq, Tk]
    visible = visible_pairs(call, distance)
    if finite or content is not products:
        score = content(q, k)
    else:  # 0 · NaN is NaN: what is not visible must not even be multiplied
        k = torch.where(visible[..., None], k[:, :, None], 0)
        score = (q[:, :, :, None] * k).sum(-1)
    if rule.distance_vec is not None:
        table = (q @ rule.distance_vec.to(q.dtype).transpose(-1, -2)).contiguous()  # [B, H, Tq, L]
        score = score + table.gather(-1, _index(call, rule.distance_vec))
    score = score * call.scale
    if rule.distance_scale is not None:
        table = rule.distance_scale.to(q.dtype)[None, :, None].expand(*q.shape[:3], -1)
        score = score.relu() * table.gather(-1, _index(call, rule.distance_scale))
    if rule.distance_bias is not None:
        table = rule.distance_bias.to(q.dtype)[None, :, None].expand(*q.shape[:3], -1)
        score = score + table.gather(-1, _index(call, rule.distance_bias))
    if rule.key_bias is not None:
        bias = rule.key_bias.to(q.dtype)
        score = score + bias.repeat_interleave(q.shape[1] // bias.shape[1], 1)[:, :, None]
    if rule.forget is not None:
        gate = rule.forget.to(torch.promote_types(rule.forget.dtype, q.dtype))
        score = score + (gate[..., gate.shape[2] - q.shape[2] :, None] - gate[..., None, :]).to(q.dtype)
    for m in span_masks(call, distance):
        score = score + torch.where(visible, m, 1).log().to(q.dtype)
    return torch.where(visible, score, -math.inf), visible


def signed_distances(call: Call) -> Tensor:
    """[1 or B, 1, Tq, Tk]: i − j, from the previous token by the original's conventions."""
    q_pos, k_pos = call.positions()
    return q_pos[:, None, :, None] - k_pos[:, None, None, :] - call.shift


def distances(call: Call) -> Tensor:
    """The same, |i − j| if not causal."""
    d = signed_distances(call)
    return d if call.rule.causal else d.abs()


def visible_pairs(call: Call, distance: Tensor) -> Tensor:
    """[B, H, Tq, Tk], True where a pair has weight."""
    rule, (b, h, tq, _) = call.rule, call.q.shape
    near = (distance >= 0).expand(b, h, tq, call.k.shape[2])
    seen = near
    if rule.reach is not None:
        reach = torch.as_tensor(rule.reach_list(), device=distance.device)
        seen = seen & (distance < reach[None, :, None, None])
    for m in span_masks(call, distance):
        seen = seen & (m.detach() > 0)
    if rule.stride != 1 or rule.skip != 0:
        stride, skip = torch.tensor(rule.strides(), device=distance.device).T[:, None, :, None, None]
        seen = seen & (distance % stride == 0) & (distance >= skip)
    if rule.kept:
        seen = seen | (near & kept_keys(call)[:, None, None])
    if rule.key_bias is not None:
        shown = rule.key_bias.detach() > -math.inf
        # NaN compares false, and a NaN bias must show: hide only what is exactly −inf
        shown = shown | rule.key_bias.detach().isnan()
        seen = seen & shown.repeat_interleave(h // shown.shape[1], 1)[:, :, None]
    if call.q_documents is not None and call.k_documents is not None:
        seen = seen & (call.q_documents[:, None, :, None] == call.k_documents[:, None, None, :])
    if rule.blocks is not None:
        seen = seen & rule.blocks.visible(*call.positions())
    return seen


def span_masks(call: Call, distance: Tensor) -> list[Tensor]:
    """m of the queries' spans [1 or B, H, Tq or 1, Tk] and of the keys' [1 or B, 1 or H, Tq, Tk], those that there are.
    Their gradients live strictly on the ramp: a whole-number span sits on no kink."""
    rule, found = call.rule, []
    wide = torch.promote_types(call.q.dtype, torch.float32)  # bfloat16 cannot tell distance 1001 from 1000
    if rule.span is not None:
        found.append(rule.span[..., None] if rule.dynamic else rule.span[None, :, None, None])
    if rule.key_span is not None:
        found.append(rule.key_span[:, :, None])
    masks = []
    for z in found:
        m = (z.to(wide) - distance.to(wide) + rule.ramp) / rule.ramp  # z − d first: close on the ramp, so it is exact
        m = torch.where(m >= 1, 1, torch.where(m <= 0, 0, m))
        masks.append(torch.where(kept_keys(call)[:, None, None], 1, m) if rule.kept else m)
    return masks


def kept_keys(call: Call) -> Tensor:
    """[1 or B, Tk], True for keys that are seen whatever reach and span say."""
    keys = call.positions()[1]
    return (keys >= 0) & (keys < call.rule.kept)


def kept_weights(call: Call) -> Tensor:
    """[B, H, Tq, Tk], True where dropout leaves a weight."""
    assert call.seed is not None
    heads, queries, keys = call.numbered()
    return dropping.keep(
        call.seed, call.dropout, heads[..., None, None], queries[:, None, :, None], keys[:, None, None]
    )


def _index(call: Call, table: Tensor, ahead: int | None = None) -> Tensor:
    """[B, H, Tq, Tk] where to read a table over distances. Pairs outside it are hidden by reach or causality, so any
    entry will do; distance_value goes on with its ends."""
    at = entry(signed_distances(call), call.rule.causal, call.rule.ahead if ahead is None else ahead)
    return at.clamp(0, table.shape[1] - 1).expand(*call.q.shape[:3], call.k.shape[2])


_unserved = unserved_terms(
    "reference", "ahead", "distance_scale", "distance_value", "key_span", "forget", "kept", "stride", "skip", "also"
)
BACKEND = Backend("reference", unusable=lambda: [], refuses=lambda call: _unserved(call.rule), run=attend_reference)
