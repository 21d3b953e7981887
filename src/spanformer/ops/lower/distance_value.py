"""Values by distance: Self-Attention with Relative Position Representations (Shaw, Uszkoreit, Vaswani, 2018), eq. 3.
https://arxiv.org/abs/1803.02155

    out_i = Σ_j a_ij·v_j + Σ_j a_ij·r[d]   =   Σ_j a_ij·v_j + Σ_near p_i(d)·r[d] + (Σ_j a_ij − Σ_near p_i(d))·r[last]

Backends receive only calls without this term. The weights p_i(d) of the few distances that have their own vector are
computed by a second attention over a window of just those: values are one-hot in (position mod P). P consecutive
positions all differ in it, so column (i − d) mod P of the result is the weight at distance d. This costs O(T · P),
works with every term of a rule and with dropout, and autograd differentiates it.

Shapes: B batch, H heads, Tq queries, Tk keys, L entries of the table, P columns, N near distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops.attended import Attended
from spanformer.ops.lower.call import Call, longest_distance
from spanformer.ops.rule import Rule
from spanformer.ops.tables import entry, future_of

WIDEST = 256  # the largest head size that every backend takes


def attend_values(call: Call, run: Callable[[Call], Attended]) -> Attended:
    """`run` serves calls without distance_value."""
    rule, table = call.rule, call.rule.distance_value
    assert table is not None
    bare = replace(call, rule=replace(rule, distance_value=None))
    counting = bool(call.dropout) or rule.sink_logits is not None  # weights do not sum to 1: add them up
    if counting:
        ones = torch.ones_like(call.v[..., :1])
        found = _run_wide(bare, torch.cat([call.v, ones], -1), run)
        out, total = found.out[..., :-1], found.out[..., -1:]
    else:
        found = run(bare)
        out, total = found.out, (found.lse > -math.inf).to(found.out.dtype)[..., None]
    table = table.to(out.dtype)
    future = future_of(rule, "distance_value")
    near, far = _near(call, table.shape[1] - future)
    if near:
        d, weights = _near_weights(bare, near, found.lse, run)  # [N], [B, H, Tq, N]
        out = out + weights.to(out.dtype) @ table.index_select(1, entry(d, rule.causal, future))
    else:
        d, weights = call.k.new_zeros(0), total[..., :0]
    if not far:
        return Attended(out, found.lse)
    if not rule.max_future:
        return Attended(out + (total - weights.sum(-1, keepdim=True)) * table[:, -1:], found.lse)
    back = _weight_behind(bare, found.lse, run)
    far_back = back - (weights * (d >= 0)).sum(-1, keepdim=True)
    far_ahead = total - back - (weights * (d < 0)).sum(-1, keepdim=True)
    return Attended(out + far_back * table[:, -1:] + far_ahead * table[:, :1], found.lse)


def _near(call: Call, entries: int) -> tuple[int, bool]:
    """How many distances, |d| = 0, 1, …, get their weights one by one, and whether farther ones exist, which read an
    end. The weight of the farther ones is a difference, with its rounding error; without them, nothing is
    subtracted."""
    readable = call.q.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable or call.q_positions is None:
        seen = longest_distance(call)
        seen = min(seen, max(max(some.rule.limits()) for some in (call, *call.others))) if readable else seen
        if seen <= entries:
            return seen, False
    return entries - 1, True


def _near_weights(call: Call, near: int, lse: Tensor, run: Callable[[Call], Attended]) -> tuple[Tensor, Tensor]:
    """The signed distances |d| < near (from 0 on if causal), and the weight at each."""
    rule, (q_pos, k_pos) = call.rule, call.positions()
    d = torch.arange(0 if rule.causal else 1 - near, near, device=call.q.device)
    columns = torch.arange(len(d), device=call.q.device)
    coded = (k_pos[..., None] % len(d) == columns).to(call.v.dtype)[:, None]  # [1 or B, 1, Tk, P]
    window = Rule(rule.heads, causal=False, reach=near)
    near_by = call.each(lambda some: replace(some, rule=some.rule + window))
    found = _run_wide(near_by, coded.expand(*call.k.shape[:3], -1), run)
    column = (q_pos[..., None] - call.shift - d) % len(d)  # [1 or B, Tq, N]
    by_distance = found.out.gather(-1, column[:, None].expand(found.out.shape))
    return d, by_distance * _share(found.lse, lse).to(by_distance.dtype)


def _run_wide(call: Call, v: Tensor, run: Callable[[Call], Attended]) -> Attended:
    """Attention with values v of any size, at most WIDEST columns at a time."""
    found = [run(_with_values(call, columns)) for columns in v.split(WIDEST, -1)]
    return found[0] if len(found) == 1 else Attended(torch.cat([part.out for part in found], -1), found[0].lse)


def _with_values(call: Call, v: Tensor) -> Call:
    return call.each(lambda some: replace(some, v=v))


def _weight_behind(call: Call, lse: Tensor, run: Callable[[Call], Attended]) -> Tensor:
    """[B, H, Tq, 1] the total weight at d ≥ 0."""
    q_positions, k_positions = call.positions()  # explicit: there may be more queries than keys here
    behind = call.each(
        lambda some: replace(
            some, rule=some.rule + Rule(some.rule.heads), q_positions=q_positions, k_positions=k_positions
        )
    )
    found = run(_with_values(behind, torch.ones_like(call.v[..., :1])))
    return found.out * _share(found.lse, lse).to(found.out.dtype)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """[B, H, Tq, 1] exp(part − whole), 0 where the part saw nothing."""
    some = part > -math.inf
    return torch.where(some, (torch.where(some, part, 0) - torch.where(some, whole, 0)).exp(), 0)[..., None]
