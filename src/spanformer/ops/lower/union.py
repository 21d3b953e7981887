"""A Union: a call for each of its rules, merged by lse. Only one rule shows each pair, so the sums are correct."""

from __future__ import annotations

from dataclasses import replace

from spanformer.ops.lower.call import Call
from spanformer.ops.lower.sink_tokens import hide


def split_union(call: Call) -> tuple[Call, ...]:
    """A call for each rule; only the first sees sink tokens."""
    own = replace(call, others=())
    if not call.rule.sink_tokens:
        return own, *call.others
    keys = call.positions()[1]
    early = (keys >= 0) & (keys < call.rule.sink_tokens)
    return own, *(replace(other, rule=hide(other.rule, early)) for other in call.others)
