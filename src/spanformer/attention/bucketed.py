"""The base of mechanisms whose tokens see the last tokens of their own bucket (LSH, routing).

    seen_i = the last w tokens before i whose bucket is that of i, in any of R rounds of buckets

Shapes: B batch, H heads, Hkv key/value heads, N = B·H, R rounds, T tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import Attention, View
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.memory.buckets import Buckets, BucketSizes
from spanformer.ops import AnyRule, Attended, Rule
from spanformer.ops.bucket_rounds import attend_buckets
from spanformer.ops.buckets import Placed, Seen, Sorted, sort_tokens

MOST = 1 << 16
"""buckets: each has room for as many tokens as a text may hold"""


class Bucketed(Attention):
    """A subclass gives `queries`, `keys` and `hashed` (buckets). Keys are made of queries, so that a layer's key
    projection is not used."""

    def __init__(self, heads: int, window: int, buckets: int, rounds: int) -> None:
        super().__init__()
        for name, n in (("heads", heads), ("window", window), ("rounds", rounds)):
            if n < 1:
                raise ValueError(f"{name} is {n}; expected at least 1")
        if not 1 <= buckets <= MOST:
            raise ValueError(f"the number of buckets or clusters is {buckets}; expected 1 … {MOST:,}")
        self.heads, self.window, self.buckets, self.rounds, self.causal = heads, window, buckets, rounds, True
        self.span: AdaptiveSpan | None = None
        """learned, in ranks of the bucket"""

    def queries(self, q: Tensor) -> Tensor:
        """The layer's queries [B, H, T, D] → those that are multiplied."""
        return q

    def keys(self, x: Tensor) -> Tensor:
        """What `queries` gave → keys."""
        return x

    def hashed(self, x: Tensor) -> Tensor:
        """What `queries` gave [B, H, T, D] → buckets [B, H, R, T] in 0 … buckets − 1, or `buckets` where x is NaN."""
        raise NotImplementedError(f"{type(self).__name__} has no hashed; override hashed")

    def seen(self, batch: int) -> Seen:
        """What a token sees of its bucket, for this many texts."""
        raise NotImplementedError(f"{type(self).__name__} has no seen; override seen")

    def attend_sorted(self, placed: Placed, among: Sorted, seen: Seen) -> Attended:
        """Of a text without a past: out [N, T, D] and lse [N, T]."""
        return attend_buckets(placed.q, self.keys(placed.q), placed.v, among, seen)

    def finish(self, found: Attended, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        """The output, from what was seen in buckets and rings; q, k, v [N, T, D]."""
        return found

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if position is None or getattr(position, "absolute", False):
            return []
        return [
            f"{type(self).__name__} compares tokens by content and knows no distances in the text; use positions that "
            "are added to the embeddings (none, sinusoidal or learned)"
        ]

    def rule(self, view: View) -> AnyRule:
        """Not what it sees, which depends on the queries: only its heads and direction."""
        return Rule(self.heads, causal=self.causal)

    def context_length(self) -> list[int]:
        """No earlier hidden states: `Buckets` remembers what it needs."""
        return [0] * self.heads

    def mean_context(self) -> list[int]:
        """[heads] how many keys a token sees at most, itself included."""
        if self.span is None:
            return [self.rounds * self.window + 1] * self.heads
        return [self.rounds * min(n + 1, self.window) + 1 for n in self.span.context_length()]

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        return Buckets(shape, BucketSizes(self.heads, self.rounds, self.buckets, self.window))

    def place(self, q: Tensor, v: Tensor, view: View) -> Placed:
        """The layer's queries [B, H, T, D] and values [B, Hkv, T, D] with their buckets. Padding is in a bucket that no
        token sees."""
        (b, h, t, _), documents, padding = q.shape, view.documents, view.padding
        mapped = self.queries(q)
        with torch.no_grad():
            ids = self.hashed(mapped.detach())
            real = torch.full((b,), t, device=q.device)
            if padding is not None:
                padding = padding[:, padding.shape[1] - t :]
                ids = ids.masked_fill(padding[:, None, None], self.buckets + 1)
                real = t - padding.sum(1)
        if documents is not None:
            documents = documents[0] if isinstance(documents, tuple) else documents[:, documents.shape[1] - t :]
            documents = documents.long()[:, None].expand(-1, h, -1).reshape(b * h, t)
        values = v.repeat_interleave(h // v.shape[1], 1) if v.shape[1] < h else v
        mapped, values = (x.reshape(b * h, t, -1) for x in (mapped, values))
        return Placed(mapped, values, ids.flatten(0, 1), documents, real)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        placed = self.place(q, v, view)
        among = sort_tokens(placed.ids, placed.documents)
        found = self.attend_sorted(placed, among, self.seen(len(q)))
        return Attended(found.out.view(*q.shape[:3], -1), found.lse.view(q.shape[:3]))

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        return None if self.span is None else self.span.penalty()

    def spans(self) -> list[float | None]:
        return super().spans() if self.span is None else self.span.spans()

    def after_step(self) -> None:
        if self.span is not None:
            self.span.after_step()
