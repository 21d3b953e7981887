"""Forget gates (`Rule.forget`) in front of the backends, which never see them.

    s_ij + c_i − c_j = (s_ij − (c_j − c_last)) + (c_i − c_last)

The first part is a key bias. The second is the same for all keys of a query, so the softmax cancels it: it
is added to lse afterwards, which therefore is the true one and can be merged. A learned sink, which forgets nothing,
comes in by lse too. c counts from the last key, so that float32 is most exact where nothing is forgotten yet: scores
are off by about what is forgotten from a query to the last key, times the dtype's rounding. Where it counts from makes
no difference, so that no gradient goes there: only the rounding of all the others would add up.

Shapes: B batch, H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spanformer.ops.attended import Attended
from spanformer.ops.lower.call import Call
from spanformer.ops.merge import merge
from spanformer.ops.rule import Rule


def without_forget(call: Call) -> Call:
    """The call with a key bias in place of forget gates, and without sinks."""
    rule, c = call.rule, call.rule.forget
    assert c is not None
    wide = torch.promote_types(call.q.dtype, torch.float32)
    bias = (c[..., -1:].detach() - c).to(wide)  # in c's own dtype first: it may be a sum over a long text
    bare = replace(rule, forget=None, sink_logits=None)
    return replace(call, rule=bare + Rule(rule.heads, causal=False, key_bias=bias))


def with_forget(found: Attended, call: Call) -> Attended:
    """What was found for `without_forget(call)`, as the call itself would have it."""
    rule, c, tq = call.rule, call.rule.forget, call.q.shape[2]
    assert c is not None
    lost = (c[..., c.shape[2] - tq :] - c[..., -1:].detach()).to(found.lse.dtype)  # [1 or B, 1 or H, Tq]
    found = Attended(found.out, found.lse + lost)
    if rule.sink_logits is None:
        return found
    sink = rule.sink_logits.to(found.lse.dtype)[None, :, None].expand(found.lse.shape)
    return merge([found, Attended(torch.zeros_like(found.out), sink)])
