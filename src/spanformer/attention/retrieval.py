"""Retrieval heads: a short ring of exact keys, and of everything before it the k best keys for each query.

    a_ij ∝ exp(s_ij)   for j in the own block or the `ring` tokens before it, and for the k largest s_ij among the
                       `memory` tokens before those; one softmax over both, keys at their true positions

The two sets are disjoint, and the search is exact (ops/retrieve.py). So every query carries a certificate: with the lse
of what it read and the smallest retrieved score s, the n − k keys that it left out have at most the share

    r = (n − k)·e^s / ((n − k)·e^s + e^lse)

of full attention's weight, and its output is off by at most 2r·max‖v‖. `inspect.certificates` collects r.
No gradient reaches retrieved keys and values. After RetrievalAttention (Liu et al., 2024),
https://arxiv.org/abs/2409.10516, whose search is approximate and has no bound.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.attention.base import Attention, View, adds_rule
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape
from spanformer.memory.block_layout import BlockSizes
from spanformer.memory.retrieved import Retrieved, StoreLayout
from spanformer.ops import AnyRule, Attended, Rule, merge


class Retrieval(Attention):
    def __init__(
        self, heads: int, dim: int, *, ring: int = 128, memory: int = 8192, k: int = 64, block: int = 64
    ) -> None:  # fmt: skip
        super().__init__()
        if k < 1:
            raise ValueError(f"k is {k}; expected at least 1")
        _check_multiple("ring", ring, block)
        self.heads, self.dim, self.ring, self.k, self.block, self.causal = heads, dim, ring, k, block, True
        self.resize(memory)
        self.omitted: list[Tensor] | None = None
        """[B, H, T] the share r of every query, one entry for each piece; None: not collected"""

    @classmethod
    def build(cls, spec: HeadSpec) -> Retrieval:
        p = spec.p
        return cls(spec.heads, spec.dim, ring=p.ring, memory=p.memory, k=p.k, block=p.block)

    def resize(self, memory: int) -> None:
        """Search this many tokens before the ring from the next state or cache on; a trained model may get more."""
        _check_multiple("memory", memory, self.block)
        self.memory = memory

    @property
    def reach(self) -> int:
        """Distances that are read exactly."""
        return self.ring + self.block

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if not adds_rule(position):
            return []
        return [
            f"{type(self).__name__} does not support this position encoding: the search finds keys by products alone, "
            "without terms for distances; use rotary or absolute positions, or none"
        ]

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads)

    def query_vectors(self, q: Tensor) -> Tensor:
        """The layer's queries [B, H, T, D] → those that are multiplied with the keys."""
        return q

    def key_vectors(self, k: Tensor) -> Tensor:
        """The layer's keys [B, Hkv, T, D] → those that are stored."""
        return k

    def combine(self, near: Attended, far: Attended | None, rest: Tensor | None) -> Attended:
        """far: of what was retrieved; rest [B, H, T]: log of the most that all other keys weigh together."""
        found = near if far is None else merge([near, far])
        if self.omitted is not None:
            share = torch.zeros_like(found.lse) if rest is None else (rest - found.lse).sigmoid()
            self.omitted.append(share.detach())
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """The exact part, at the positions of the view (memory/retrieved.py). Without positions, a text that the ring
        holds."""
        if view.q_positions is None and k.shape[2] > self.reach:
            raise ValueError(
                f"k has {k.shape[2]} tokens and no memory; expected at most {self.reach}, since older ones are "
                "retrieved: run a layer of a model instead"
            )
        return super().forward(q, k, v, rule, view)

    def new_memory(self, shape: MemoryShape) -> Retrieved:
        return self._memory(shape, raw=False)

    def _memory(self, shape: MemoryShape, *, raw: bool) -> Retrieved:
        """raw: retrieved keys have no positions."""
        sizes = BlockSizes(self.dim, self.block, self.ring, slots=0, ratio=1, most_used=False, far=())
        return Retrieved(StoreLayout(shape, sizes, self.memory, raw))

    def context_length(self) -> list[int]:
        return [self.reach + self.memory - 1] * self.heads

    def mean_context(self) -> list[int]:
        """Keys that are read: half of the own block, the ring, and what was retrieved."""
        return [self.block // 2 + self.ring + min(self.k, self.memory)] * self.heads

    def extra_repr(self) -> str:
        return f"heads={self.heads}, ring={self.ring}, memory={self.memory}, k={self.k}, block={self.block}"


def _check_multiple(name: str, n: int, block: int) -> None:
    if n < block or n % block:
        raise ValueError(f"{name} is {n}; expected a multiple of block, {block}: tokens move block by block")
