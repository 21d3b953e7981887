"""Self-attention Does Not Need O(n²) Memory (Rabe, Staats, 2021). https://arxiv.org/abs/2112.05682

    for each chunk of queries, over chunks c of keys:   out_c, lse_c = softmax attention over c only
    out = Σ_c exp(lse_c − lse) · out_c        lse = log Σ_c exp(lse_c)

Only one chunk of scores is in memory at a time, also in the backward pass, which recomputes them. It takes any rule,
and skips chunks of keys that no query of a chunk reaches. It shows the method, and serves scores that are not dot
products; the backends do the same faster. Shapes: B batch, H heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spanformer.attention.base import Attention, View, own_output
from spanformer.attention.full import build as build_full
from spanformer.attention.wrapper import Wrapper
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, merge
from spanformer.ops.backends.reference import attend_reference
from spanformer.ops.dropout import draw_seed
from spanformer.ops.lower import Lowered, lower, make_call, split_heads
from spanformer.ops.lower.piece import piece

Content = Callable[[Tensor, Tensor], Tensor]
"""q [B, H, Tq, D], k [B, H, Tk, D] → scores [B, H, Tq, Tk]"""


class Chunked(Wrapper):
    """Attention by `inner`'s rule, `queries` × `keys` pairs at a time."""

    def __init__(self, inner: Attention, *, queries: int = 256, keys: int = 1024) -> None:
        super().__init__(inner)
        if queries < 1 or keys < 1:
            raise ValueError(f"queries is {queries} and keys {keys}; expected chunks of at least 1 token each")
        self.queries, self.keys = queries, keys

    @classmethod
    def build(cls, spec: HeadSpec) -> Chunked:
        return cls(build_full(spec), queries=spec.p.queries, keys=spec.p.keys)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = self.inner.supports(position=position, persistent=persistent)
        return [*reasons, *own_output(self, cache=cache, mixed=mixed)]

    def content(self) -> tuple[Content, float | None]:
        """The score function of queries and keys, and its scale (None: 1/√D)."""
        return lambda q, k: q @ k.transpose(-1, -2), None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        content, scale = self.content()
        rule = rule + view.rule(rule.heads, causal=rule.causal)
        dropout = self.dropout if self.training else 0.0
        found = []
        for some in split_heads(q, k, v, rule):
            seed = draw_seed(None, q.device) if dropout else None
            call = make_call(
                *some, scale=scale, dropout=dropout, seed=seed, q_positions=view.q_positions,
                k_positions=view.k_positions,
            )  # fmt: skip
            found.append(lower(call, lambda lowered: self._run(lowered, content)))
        return Attended(*(torch.cat(each, 1) for each in zip(*found, strict=True)))

    def _run(self, call: Lowered, content: Content) -> Attended:
        q_positions, k_positions = call.positions()  # once for all chunks: otherwise each would keep a copy
        call = replace(call, q_positions=q_positions, k_positions=k_positions)
        chunks = [self._queries(call, start, content) for start in range(0, max(call.q.shape[2], 1), self.queries)]
        return Attended(*(torch.cat(each, 2) for each in zip(*chunks, strict=True)))

    def _queries(self, call: Lowered, start: int, content: Content) -> Attended:
        """One chunk of queries over all chunks of keys."""
        stop, found = min(start + self.queries, call.q.shape[2]), None
        for first in range(0, max(call.k.shape[2], 1), self.keys):
            part = piece(call, slice(start, stop), slice(first, first + self.keys))
            if found is not None:
                if not _near(part):
                    continue
                part = replace(part, sink_logits=None)  # only one chunk counts the sink logit
            # no random state to preserve: dropout has a seed
            more = checkpoint(attend_reference, part, content, use_reentrant=False, preserve_rng_state=False)
            assert isinstance(more, Attended)
            found = more if found is None else merge([found, more])
        assert found is not None
        return found

    def extra_repr(self) -> str:
        return f"queries={self.queries}, keys={self.keys}"


def _near(call: Lowered) -> bool:
    """Whether any query may reach any key; True on accelerators, where the check would be a sync."""
    if call.q.device.type != "cpu" or not call.q.shape[2] or not call.k.shape[2]:
        return True
    (q, k), reach = call.positions(), max(call.limits())
    back = int((q.amax(1) - k.amin(1)).max()) - call.shift  # the greatest distance
    nearest = int((q.amin(1) - k.amax(1)).min()) - call.shift
    future = int((k.amin(1) - q.amax(1)).min()) + call.shift
    return nearest < reach and (back >= 0 if call.causal else future < reach)
