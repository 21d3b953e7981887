"""Self-attention Does Not Need O(n²) Memory (Rabe, Staats, 2021). https://arxiv.org/abs/2112.05682

    for each chunk of queries, over chunks c of keys:   out_c, lse_c = softmax attention over c alone
    out = Σ_c exp(lse_c − lse) · out_c        lse = log Σ_c exp(lse_c)

No more than one chunk's scores stand at a time, in the backward pass too: they are computed again there. It serves any
rule, and leaves out chunks of keys that no query of a chunk reaches. For reading and for scores that are no products;
the backends do the same faster. Shapes: B batch, H heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spanformer.attention.around import Around
from spanformer.attention.base import Attention, View
from spanformer.ops import Attended, Rule, merge
from spanformer.ops.apart import by_parts
from spanformer.ops.call import Call, make_call
from spanformer.ops.dropout import draw_seed
from spanformer.ops.parts import attend_parts
from spanformer.ops.pieces import piece
from spanformer.ops.reference import attend_reference

Content = Callable[[Tensor, Tensor], Tensor]
"""q [B, H, Tq, D], k [B, H, Tk, D] → scores [B, H, Tq, Tk]"""


class Chunked(Around):
    """What `inner`'s heads see, `queries` × `keys` pairs at a time."""

    alone = True

    def __init__(self, inner: Attention, *, queries: int = 256, keys: int = 1024) -> None:
        super().__init__(inner)
        if queries < 1 or keys < 1:
            raise ValueError(f"queries is {queries} and keys {keys}; expected chunks of at least 1")
        self.queries, self.keys = queries, keys

    def content(self) -> tuple[Content, float | None]:
        """What is computed of a query and a key, and what it is multiplied with (None: 1/√D)."""
        return lambda q, k: q @ k.transpose(-1, -2), None

    def mix(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View) -> Attended:
        content, scale = self.content()
        rule = rule + view.rule(rule.heads, causal=rule.causal)
        dropout = self.dropout if self.training else 0.0
        found = []
        for some in by_parts(q, k, v, rule):
            seed = draw_seed(None, q.device) if dropout else None
            call = make_call(
                *some, scale=scale, dropout=dropout, seed=seed, q_positions=view.q_positions,
                k_positions=view.k_positions,
            )  # fmt: skip
            found.append(attend_parts(call, lambda plain: self._run(plain, content)))
        return Attended(*(torch.cat(each, 1) for each in zip(*found, strict=True)))

    def _run(self, call: Call, content: Content) -> Attended:
        q_positions, k_positions = call.positions()  # once: each chunk would keep the whole text's
        call = replace(call, q_positions=q_positions, k_positions=k_positions)
        chunks = [self._queries(call, start, content) for start in range(0, max(call.q.shape[2], 1), self.queries)]
        return Attended(*(torch.cat(each, 2) for each in zip(*chunks, strict=True)))

    def _queries(self, call: Call, start: int, content: Content) -> Attended:
        """One chunk of queries over all chunks of keys."""
        stop, found = min(start + self.queries, call.q.shape[2]), None
        for first in range(0, max(call.k.shape[2], 1), self.keys):
            part = piece(call, slice(start, stop), slice(first, first + self.keys))
            if found is not None:
                if not _near(part):
                    continue
                part = replace(part, rule=replace(part.rule, sinks=None))  # one of the chunks has the learned sink
            # nothing is drawn in it: dropout has a seed
            more = checkpoint(attend_reference, part, content, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(more, Attended)
            found = more if found is None else merge([found, more])
        assert found is not None
        return found

    def extra_repr(self) -> str:
        return f"queries={self.queries}, keys={self.keys}"


def _near(call: Call) -> bool:
    """Whether any query may reach any key, where asking is free."""
    if call.q.device.type != "cpu" or not call.q.shape[2] or not call.k.shape[2]:
        return True
    (q, k), reach = call.positions(), max(call.rule.limits())
    back = int((q.amax(1) - k.amin(1)).max()) - call.shift  # the greatest distance
    nearest = int((q.amin(1) - k.amax(1)).min()) - call.shift
    ahead = int((k.amin(1) - q.amax(1)).min()) + call.shift
    return nearest < reach and (back >= 0 if call.rule.causal else ahead < reach)
