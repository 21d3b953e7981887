"""Hard attention: each query takes the value of one key, the best one or one drawn by its weight.

    j_i = argmax_j s_ij, or drawn with p_ij = softmax_j(s_ij)        out_i = v_{j_i}

Of keys with equal scores the later one is taken. Scores are computed for a chunk of queries at a time, and again in the
backward pass, so nothing of size Tq × Tk is kept.
Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spanformer.ops.backends.reference import pair_scores, products
from spanformer.ops.lower import Call, Dense, dense
from spanformer.ops.lower.piece import piece
from spanformer.ops.tables import entry, future_of

QUERIES = 64
"""of a chunk"""


class Choice(NamedTuple):
    """What each query chose; the last three only where weights were asked for."""

    out: Tensor
    """[B, H, Tq, Dv]; zeros where no key is seen, NaN where a score is"""
    score: Tensor
    """[B, H, Tq] of the chosen key; −inf where none is seen"""
    log_p: Tensor | None = None
    """[B, H, Tq] the log of the chosen key's weight, with its gradient"""
    entropy: Tensor | None = None
    """[B, H, Tq] of the weights, in nats"""
    spread: Tensor | None = None
    """[B, H, Tq] ‖e_j − p‖², the square of the gradient of log_p with respect to the scores"""


def attend_one(call: Call, *, sample: bool = False, soft: bool = False, weights: bool = False) -> Choice:
    """sample: draw keys by their weights, with torch's generator. soft: scores get the gradient that the weights of a
    softmax would have (straight-through). weights: also log_p, entropy and spread."""
    ordered, (q_positions, k_positions) = call.q_positions is None, call.positions()
    call = replace(call, q_positions=q_positions, k_positions=k_positions)  # once: otherwise each chunk keeps a copy
    finite = all(bool(t.isfinite().all()) for t in (call.q, call.k, call.v))
    starts = range(0, max(call.q.shape[2], 1), QUERIES)
    parts = [_near(call, slice(n, min(n + QUERIES, call.q.shape[2])), ordered) for n in starts]
    if not torch.is_grad_enabled():
        found = [_choose(part, finite, sample, soft, weights) for part in parts]
    else:
        found = [
            checkpoint(_choose, part, finite, sample, soft, weights, use_reentrant=False, preserve_rng_state=sample)
            for part in parts
        ]
    return Choice(*(None if each[0] is None else torch.cat(each, 2) for each in zip(*found, strict=True)))  # pyright: ignore


def _near(call: Call, queries: slice, ordered: bool) -> Dense:
    """Some queries with the keys that they may see. ordered: queries are the last of the keys, in their order."""
    first, last = 0, call.k.shape[2]
    if ordered:
        reach = max(call.rule.limits()) + call.shift
        first = max(0, queries.start + call.offset - reach + 1)
        last = min(last, queries.stop + call.offset + (0 if call.rule.causal else reach - 1))
    return dense(piece(call, queries, slice(first, max(first, last))))


def _choose(call: Dense, finite: bool, sample: bool, soft: bool, weights: bool) -> Choice:
    (b, h, t, _), group = call.q.shape, call.q.shape[1] // call.k.shape[1]
    k, v = call.k.repeat_interleave(group, 1), call.v.repeat_interleave(group, 1)
    if not k.shape[2]:
        none = call.q.new_full((b, h, t), -math.inf)
        return Choice(v.new_zeros(b, h, t, v.shape[3]), none, *([none * 0 if weights else None] * 3))
    score, visible = pair_scores(call, k, finite, products)
    score = score.to(torch.promote_types(score.dtype, torch.float32))
    with torch.no_grad():
        noise = -torch.empty_like(score).exponential_().log() if sample else 0  # the largest is drawn by its weight
        at = _latest_best(score + noise, call)
    best = score.gather(-1, at)[..., 0]
    nothing = best.detach() == -math.inf
    out, table = _rows(v, at), call.distance_value
    if table is not None:
        out = out + _values_at(call, table, at).to(out.dtype)
    out = out.masked_fill(nothing[..., None], 0).masked_fill(best.detach().isnan()[..., None], math.nan)
    if not (soft or weights):
        return Choice(out, best.detach())
    score = score.masked_fill(nothing[..., None], 0)  # the gradient of a row of −inf is NaN
    lse = score.logsumexp(-1, keepdim=True)
    p = torch.where(visible, (score - lse).exp(), 0)
    if soft:
        hard = (p - p.detach()).to(v.dtype)  # 0, with the gradient of a softmax's weights
        out = out + _mixed(call, hard, v.detach(), visible, finite)
    if not weights:
        return Choice(out, best.detach())
    log_p = torch.where(nothing, 0, best - lse[..., 0])
    with torch.no_grad():
        entropy = lse[..., 0] - torch.where(visible, p * score, 0).sum(-1)
        spread = torch.where(nothing, 0, 1 - 2 * log_p.exp() + p.square().sum(-1))
    return Choice(out, best.detach(), log_p, torch.where(nothing, 0, entropy), spread)


def _latest_best(score: Tensor, call: Dense) -> Tensor:
    """[B, H, Tq, 1] the last of the keys with the largest score, or of those whose score is NaN."""
    top = score.amax(-1, keepdim=True)
    tied = (score == top) | (top.isnan() & score.isnan())
    places = call.positions()[1][:, None, None]  # a ring does not hold keys in their order
    return torch.where(tied, places, torch.iinfo(places.dtype).min).argmax(-1, keepdim=True)


def _rows(v: Tensor, at: Tensor) -> Tensor:
    """v [B, H, Tk, Dv] at [B, H, Tq, 1] → [B, H, Tq, Dv]"""
    return v.gather(2, at.expand(*at.shape[:3], v.shape[3]))


def _entries(call: Dense, table: Tensor) -> Tensor:
    """[1 or B, 1, Tq, Tk] the entries of distance_value that pairs read."""
    q_pos, k_pos = call.positions()
    d = q_pos[:, None, :, None] - k_pos[:, None, None, :] - call.shift
    return entry(d, call.causal, future_of(call, "distance_value")).clamp(0, table.shape[1] - 1)


def _values_at(call: Dense, table: Tensor, at: Tensor) -> Tensor:
    """[B, H, Tq, Dv] distance_value of the chosen keys."""
    entries = _entries(call, table).expand(*at.shape[:3], call.k.shape[2]).gather(-1, at)
    return _rows(table.expand(at.shape[1], -1, -1)[None].expand(at.shape[0], -1, -1, -1), entries)


def _mixed(call: Dense, weight: Tensor, v: Tensor, visible: Tensor, finite: bool) -> Tensor:
    """Σ_j weight_ij (v_j + distance_value), of which a hidden pair is no part."""
    out = weight @ v if finite else (weight[..., None] * torch.where(visible[..., None], v[:, :, None], 0)).sum(-2)
    if call.distance_value is None:
        return out
    table = call.distance_value.detach()
    entries = _entries(call, table).expand(weight.shape)
    by_entry = weight.new_zeros(*weight.shape[:3], table.shape[1]).scatter_add(-1, entries, weight)
    return out + by_entry @ table.to(v.dtype)
