"""A call whose rule says more than a backend takes becomes several calls: values by distance, a rule's `also` and kept
keys (merged by lse), forget gates, strides and skips. Backends see plain calls only; the reference sees the dense
equation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spanformer.ops import kept, lives
from spanformer.ops.call import Attended, Call, make_call
from spanformer.ops.fold import attend_folded
from spanformer.ops.forget import with_forget, without_forget
from spanformer.ops.merge import merge
from spanformer.ops.values import attend_values, without_values


def attend_parts(call: Call, run: Callable[[Call], Attended]) -> Attended:
    rule = call.rule
    if rule.distance_value is not None:
        return attend_values(call, lambda part: attend_parts(part, run))
    if rule.also is not None:
        return merge([attend_parts(part, run) for part in union(call)])
    if rule.forget is not None:
        return with_forget(attend_parts(without_forget(call), run), call)
    if rule.kept:
        return merge([attend_parts(part, run) for part in kept.split(call)])
    if rule.stride != 1 or rule.skip != 0:
        return attend_folded(call, run)
    if rule.key_span is not None and (both := lives.split(call)) is not None:
        return merge([run(part) for part in both])
    return run(call)


def union(call: Call) -> tuple[Call, Call]:
    """(by the rule itself, by its `also`, which does not see kept keys again)."""
    assert call.rule.also is not None
    own = replace(call, rule=replace(call.rule, also=None))
    other = make_call(
        call.q, call.k, call.v, call.rule.also, scale=call.scale, dropout=call.dropout, seed=call.seed,
        q_positions=call.q_positions, k_positions=call.k_positions,
    )  # fmt: skip
    if not call.rule.kept:
        return own, other
    keys = call.positions()[1]
    return own, replace(other, rule=kept.hide(other.rule, (keys >= 0) & (keys < call.rule.kept)))


def plain(call: Call) -> Call:
    """What a backend would be asked of such a call, for choosing one: the first of its parts."""
    call = without_values(replace(call, rule=replace(call.rule, also=None)))
    call = call if call.rule.forget is None else without_forget(call)
    rule = call.rule
    if rule.kept:
        call = kept.split(call)[0]
    return replace(call, rule=replace(call.rule, stride=1, skip=0))
