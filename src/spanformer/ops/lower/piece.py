"""A piece of a call: some of its queries with some of its keys, and every term sliced to match.

Shapes: Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from spanformer.ops.lower.call import Call, Numbers
from spanformer.ops.lower.lowered import Lowered
from spanformer.ops.rule import KEY_TERMS

Some = TypeVar("Some", Call, Lowered)


def piece(call: Some, queries: slice, keys: slice) -> Some:
    """Queries and keys keep their positions and their indices for dropout. Do not slice a call with forget gates:
    these depend on the index within the piece."""
    q_positions, k_positions = call.positions()
    terms, numbers = call.rule if isinstance(call, Call) else call, None
    if call.dropout:
        whole = call.numbered()
        numbers = Numbers(whole.heads, whole.queries[:, queries], whole.keys[:, keys])
    cut = {name: t[..., keys] for name in KEY_TERMS if (t := getattr(terms, name, None)) is not None}
    if terms.dynamic and terms.span is not None:
        cut["span"] = terms.span[..., queries]
    if isinstance(call, Lowered) and call.orders is not None:
        cut["orders"] = (call.orders[0][..., queries], call.orders[1][..., keys])
    if isinstance(call, Call):
        cut = {"rule": replace(call.rule, documents=None, **cut)}  # the call has them
    return replace(
        call,
        q=call.q[:, :, queries],
        k=call.k[:, :, keys],
        v=call.v[:, :, keys],
        q_positions=q_positions[:, queries],
        k_positions=k_positions[:, keys],
        q_documents=None if call.q_documents is None else call.q_documents[:, queries],
        k_documents=None if call.k_documents is None else call.k_documents[:, keys],
        numbers=numbers,
        **cut,
    )
