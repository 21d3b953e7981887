"""A piece of a call: some of its queries with some of its keys, every term of the rule cut to them.

Shapes: Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import replace

from spanformer.ops.call import Call, Numbers
from spanformer.ops.rule import KEY_TERMS


def piece(call: Call, queries: slice, keys: slice) -> Call:
    """Queries and keys keep their positions, and their numbers for dropout. Forget gates go by numbers within the
    piece: they are not to be cut this way."""
    q_positions, k_positions = call.positions()
    rule, numbers = call.rule, None
    if call.dropout:
        whole = call.numbered()
        numbers = Numbers(whole.heads, whole.queries[:, queries], whole.keys[:, keys])
    cut = {name: t[..., keys] for name in KEY_TERMS if (t := getattr(rule, name)) is not None}
    if rule.dynamic and rule.span is not None:
        cut["span"] = rule.span[..., queries]
    return replace(
        call,
        q=call.q[:, :, queries],
        k=call.k[:, :, keys],
        v=call.v[:, :, keys],
        rule=replace(rule, documents=None, **cut),  # the call has them
        q_positions=q_positions[:, queries],
        k_positions=k_positions[:, keys],
        q_documents=None if call.q_documents is None else call.q_documents[:, queries],
        k_documents=None if call.k_documents is None else call.k_documents[:, keys],
        numbers=numbers,
    )
