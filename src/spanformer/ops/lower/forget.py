"""Forget gates (`Rule.forget`) become key biases before a call reaches a backend.

    s_ij + c_i − c_j = (s_ij − (c_j − c_last)) + (c_i − c_last)

The first part is a key bias. The second is the same for all keys of a query, so it cancels in the softmax: it
is added to lse afterwards, so that lse is correct and can be merged. A learned sink logit has no gate and is added
by lse too. c is taken relative to the last key, so that float32 is most exact where gates are near 1: the error of
a score is about |c_i − c_last| times the dtype's rounding. The result does not depend on c_last, so c_last is
detached: its gradient would be the sum of rounding errors.

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
    """The call with a key bias instead of forget gates, and without sink logits."""
    rule, c = call.rule, call.rule.forget
    assert c is not None
    wide = torch.promote_types(call.q.dtype, torch.float32)
    bias = (c[..., -1:].detach() - c).to(wide)  # subtract in c's own dtype: c may be a sum over a long text
    bare = replace(rule, forget=None, sink_logits=None)
    return replace(call, rule=bare + Rule(rule.heads, causal=False, key_bias=bias))


def with_forget(found: Attended, call: Call) -> Attended:
    """The result of `call`, from the result of `without_forget(call)`."""
    rule, c, tq = call.rule, call.rule.forget, call.q.shape[2]
    assert c is not None
    lost = (c[..., c.shape[2] - tq :] - c[..., -1:].detach()).to(found.lse.dtype)  # [1 or B, 1 or H, Tq]
    found = Attended(found.out, found.lse + lost)
    if rule.sink_logits is None:
        return found
    sink = rule.sink_logits.to(found.lse.dtype)[None, :, None].expand(found.lse.shape)
    return merge([found, Attended(torch.zeros_like(found.out), sink)])
