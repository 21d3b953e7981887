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
from spanformer.ops.attended import Attended
from spanformer.ops.backends.base import Backend
from spanformer.ops.lower import Dense, Lowered
from spanformer.ops.tables import entry, future_of


def products(q: Tensor, k: Tensor) -> Tensor:
    """[B, H, Tq, Tk]"""
    return q @ k.transpose(-1, -2)


def attend_reference(call: Lowered, content: Callable[[Tensor, Tensor], Tensor] = products) -> Attended:
    """content: the score of q [B, H, Tq, D] and k [B, H, Tk, D] before `scale` and the rule's terms."""
    q = call.q
    group = q.shape[1] // call.k.shape[1]
    k, v = call.k.repeat_interleave(group, 1), call.v.repeat_interleave(group, 1)  # [B, H, Tk, ·]
    finite = bool(q.isfinite().all() and k.isfinite().all() and v.isfinite().all())
    score, visible = pair_scores(call, k, finite, content)
    for other in call.others if isinstance(call, Dense) else ():  # one softmax over the pairs of all
        more, seen = pair_scores(other, k, finite, content)
        if (sinks := _sink_keys(call)) is not None:  # the first rule shows them
            seen = seen & ~sinks[:, None, None]
        if bool((seen & visible).any()):
            raise ValueError(
                "two rules of a Union show the same pair, which would be counted twice; exclude it from one of them"
            )
        score, visible = torch.where(seen, more, score), visible | seen
    if not finite:
        v = torch.where(visible[..., None], v[:, :, None], 0)

    peak = (
        score.detach().amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*score.shape[:3], 1), -math.inf)
    )
    if call.sink_logits is not None:
        sink = call.sink_logits.to(q.dtype)[None, :, None, None]
        peak = torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -math.inf, 0, peak)  # a row that sees no key
    weight = (score - peak).exp()
    total = weight.sum(-1, keepdim=True)
    if call.sink_logits is not None:
        total = total + (sink - peak).exp()
    nothing = total == 0
    safe = torch.where(nothing, 1, total)
    lse = torch.where(nothing, -math.inf, safe.log() + peak)[..., 0]
    weight = weight / safe
    if call.dropout:
        weight = weight * kept_weights(call).to(q.dtype) / (1 - call.dropout)
    out = weight @ v if finite else (weight[..., None] * v).sum(-2)
    if isinstance(call, Dense) and call.distance_value is not None:
        table, at = (
            call.distance_value.to(q.dtype),
            _index(call, call.distance_value, future_of(call, "distance_value")),
        )
        by_entry = weight.new_zeros(*q.shape[:3], table.shape[1]).scatter_add(-1, at, weight)
        out = out + by_entry @ table
    return Attended(out, lse)


def pair_scores(
    call: Lowered, k: Tensor, finite: bool, content: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Scores of one rule's pairs, −inf where hidden, and the visible pairs: both [B, H, Tq, Tk]."""
    q = call.q
    distance = distances(call)  # [1 or B, 1, Tq, Tk]
    visible = visible_pairs(call, distance)
    if finite or content is not products:
        score = content(q, k)
    else:  # 0 · NaN is NaN: a hidden key must not enter a product
        k = torch.where(visible[..., None], k[:, :, None], 0)
        score = (q[:, :, :, None] * k).sum(-1)
    if call.distance_vec is not None:
        table = (q @ call.distance_vec.to(q.dtype).transpose(-1, -2)).contiguous()  # [B, H, Tq, L]
        score = score + table.gather(-1, _index(call, call.distance_vec))
    score = score * call.scale
    if call.distance_scale is not None:
        table = call.distance_scale.to(q.dtype)[None, :, None].expand(*q.shape[:3], -1)
        score = score.relu() * table.gather(-1, _index(call, call.distance_scale))
    if call.distance_bias is not None:
        table = call.distance_bias.to(q.dtype)[None, :, None].expand(*q.shape[:3], -1)
        score = score + table.gather(-1, _index(call, call.distance_bias))
    if call.key_bias is not None:
        bias = call.key_bias.to(q.dtype)
        score = score + bias.repeat_interleave(q.shape[1] // bias.shape[1], 1)[:, :, None]
    if isinstance(call, Dense) and call.forget is not None:
        gate = call.forget.to(torch.promote_types(call.forget.dtype, q.dtype))
        score = score + (gate[..., gate.shape[2] - q.shape[2] :, None] - gate[..., None, :]).to(q.dtype)
    for m in span_masks(call, distance):
        score = score + torch.where(visible, m, 1).log().to(q.dtype)
    return torch.where(visible, score, -math.inf), visible


def signed_distances(call: Lowered) -> Tensor:
    """[1 or B, 1, Tq, Tk]: i − j, or with paper_compat the distance from the previous token."""
    q_pos, k_pos = call.positions()
    return q_pos[:, None, :, None] - k_pos[:, None, None, :] - call.shift


def distances(call: Lowered) -> Tensor:
    """The same, |i − j| if not causal."""
    d = signed_distances(call)
    return d if call.causal else d.abs()


def visible_pairs(call: Lowered, distance: Tensor) -> Tensor:
    """[B, H, Tq, Tk], True where a pair may have weight."""
    (b, h, tq, _) = call.q.shape
    near = (distance >= 0).expand(b, h, tq, call.k.shape[2])
    seen = near
    if call.reach is not None:
        reach = torch.as_tensor(call.reach_list(), device=distance.device)
        seen = seen & (distance < reach[None, :, None, None])
    for m in span_masks(call, distance):
        seen = seen & (m.detach() > 0)
    if isinstance(call, Dense) and call.stride:
        stride, skip = torch.tensor([call.stride, call.skip], device=distance.device)[:, None, :, None, None]
        seen = seen & (distance % stride == 0) & (distance >= skip)
    if (sinks := _sink_keys(call)) is not None:
        seen = seen | (near & sinks[:, None, None])
    if call.key_bias is not None:
        shown = call.key_bias.detach() > -math.inf
        # NaN compares false, and a NaN bias must reach the output: hide only exactly −inf
        shown = shown | call.key_bias.detach().isnan()
        seen = seen & shown.repeat_interleave(h // shown.shape[1], 1)[:, :, None]
    if call.q_documents is not None and call.k_documents is not None:
        seen = seen & (call.q_documents[:, None, :, None] == call.k_documents[:, None, None, :])
    if call.orders is not None:
        seen = seen & ~_in_other_order(call, call.orders)
    if call.blocks is not None:
        seen = seen & call.blocks.visible(*call.positions())
    return seen


def _in_other_order(call: Lowered, orders: tuple[Tensor, Tensor]) -> Tensor:
    """[B, H, Tq, Tk], True where reach and span show a pair in another order."""
    found = torch.zeros((), dtype=torch.bool, device=call.q.device)
    for q, k in zip(*orders, strict=True):  # [1 or B, T]
        d = q[:, None, :, None] - k[:, None, None, :] - call.shift
        near = d >= 0
        if call.reach is not None:
            near = near & (d < torch.as_tensor(call.reach_list(), device=d.device)[None, :, None, None])
        for m in span_masks(call, d):
            near = near & (m.detach() > 0)
        found = found | near
    return found


def span_masks(call: Lowered, distance: Tensor) -> list[Tensor]:
    """m of the queries' spans [1 or B, H, Tq or 1, Tk] and of the keys' [1 or B, 1 or H, Tq, Tk], if given.
    Gradients are strictly inside the ramp: none at its edges, where whole-number spans end."""
    found = []
    wide = torch.promote_types(call.q.dtype, torch.float32)  # bfloat16 cannot tell distance 1001 from 1000
    if call.span is not None:
        found.append(call.span[..., None] if call.dynamic else call.span[None, :, None, None])
    if call.key_span is not None:
        found.append(call.key_span[:, :, None])
    masks, sinks = [], _sink_keys(call) if found else None
    for z in found:
        m = (
            z.to(wide) - distance.to(wide) + call.ramp
        ) / call.ramp  # z − d first: the two are close on the ramp, so the difference is exact
        m = torch.where(m >= 1, 1, torch.where(m <= 0, 0, m))
        masks.append(m if sinks is None else torch.where(sinks[:, None, None], 1, m))
    return masks


def _sink_keys(call: Lowered) -> Tensor | None:
    """[1 or B, Tk], True for keys that are visible whatever reach and span say; None if there are none."""
    if not isinstance(call, Dense) or not call.sink_tokens:
        return None
    keys = call.positions()[1]
    return (keys >= 0) & (keys < call.sink_tokens)


def kept_weights(call: Lowered) -> Tensor:
    """[B, H, Tq, Tk], True where dropout keeps a weight."""
    assert call.seed is not None
    heads, queries, keys = call.numbered()
    return dropping.keep(
        call.seed, call.dropout, heads[..., None, None], queries[:, None, :, None], keys[:, None, None]
    )


def _index(call: Lowered, table: Tensor, max_future: int | None = None) -> Tensor:
    """[B, H, Tq, Tk] indices into a table over distances. Pairs outside it are hidden by reach or causality, so any
    entry will do; distance_value repeats its end entries."""
    at = entry(signed_distances(call), call.causal, call.max_future if max_future is None else max_future)
    return at.clamp(0, table.shape[1] - 1).expand(*call.q.shape[:3], call.k.shape[2])


BACKEND = Backend("reference", unusable=lambda: [], refuses=lambda call: [], run=attend_reference)
