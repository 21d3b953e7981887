"""Lowering: a call whose rule has terms that backends do not take becomes several simpler calls. One file per pass, in
the order in which the passes run:

    head_groups.py      HeadGroups        one call per group of heads
    distance_value.py   distance_value    a second call over a window, with one-hot values
    union.py            Union             one call per rule, merged by lse
    forget.py           forget            a key bias, and lse corrected
    sink_tokens.py      sink_tokens       a call over the sink tokens, merged by lse
    stride.py           stride, skip      tokens folded by residue class, unfolded afterwards
    key_span.py         key_span          a call over the few keys with long spans, merged by lse
    lowered.py          all others        `Lowered`, which backends accept

`check.py` checks a call first. The reference takes a call without any pass (`dense`), so that tests can compare the
passes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from spanformer.ops.attended import Attended
from spanformer.ops.lower import key_span
from spanformer.ops.lower.call import Call, Numbers
from spanformer.ops.lower.check import make_call
from spanformer.ops.lower.distance_value import attend_values
from spanformer.ops.lower.forget import with_forget, without_forget
from spanformer.ops.lower.head_groups import split_heads
from spanformer.ops.lower.lowered import Dense, Lowered, dense, flatten
from spanformer.ops.lower.sink_tokens import split_sink_tokens
from spanformer.ops.lower.stride import attend_folded
from spanformer.ops.lower.union import split_union
from spanformer.ops.merge import merge

__all__ = [
    "Call", "Dense", "Lowered", "Numbers", "dense", "first_lowered", "flatten", "lower", "make_call", "split_heads",
]  # fmt: skip


def lower(call: Call, run: Callable[[Lowered], Attended]) -> Attended:
    """The call's result, from the results of `run` on its lowered parts."""
    rule = call.rule
    if rule.distance_value is not None:
        return attend_values(call, lambda part: lower(part, run))
    if call.others:
        return merge([lower(part, run) for part in split_union(call)])
    if rule.forget is not None:
        return with_forget(lower(without_forget(call), run), call)
    if rule.sink_tokens:
        return merge([lower(part, run) for part in split_sink_tokens(call)])
    if rule.stride != 1 or rule.skip != 0:
        return attend_folded(call, lambda part: run(flatten(part)))
    if rule.key_span is not None and (both := key_span.split_lasting(call)) is not None:
        return merge([run(flatten(part)) for part in both])
    return run(flatten(call))


def first_lowered(call: Call) -> Lowered:
    """The lowered call by which a backend is chosen."""
    call = replace(call, rule=replace(call.rule, distance_value=None), others=())
    call = call if call.rule.forget is None else without_forget(call)
    if call.rule.sink_tokens:
        call = split_sink_tokens(call)[0]
    return flatten(replace(call, rule=replace(call.rule, stride=1, skip=0)))
