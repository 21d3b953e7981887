"""Low-rank attention for language models: the own block exactly, and one pooled key for each finished block before it.

After Linformer (Wang et al., 2020), https://arxiv.org/abs/2006.04768, whose pooled keys mix all positions; here a block
is pooled only when all its tokens are past, so no output depends on a later token.

    a_ij ∝ exp(q_i·k_j / √D)  for j ≤ i in the block c of i        a_ib ∝ exp(q_i·K_b / √D)  for blocks c − N ≤ b < c

under one softmax; K_b and V_b pool the keys and values of block b (attention/pooling.py). N = max_span / size − 1.
Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention.base import Attention, RuleNeeds, View, given_terms, own_output, refused_distances, rotates
from spanformer.attention.pooling import BlockPooling
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.memory.pooled import PooledBlocks
from spanformer.ops import AnyRule, Attended, Rule, attend, merge

TERMS = ("heads", "causal", "reach", "ramp", "key_bias")
"""of a rule: padding, which `view` holds too"""


class LowRank(Attention):
    """size: tokens of a block; max_span: no token looks further back."""

    def __init__(
        self, heads: int, size: int = 64, max_span: int = 1024, *, kv_heads: int = 0, project: str = "mean"
    ) -> None:
        super().__init__()
        if heads < 1 or not 1 <= size <= max_span:
            raise ValueError(
                f"heads is {heads}, size {size} and max_span {max_span}; expected at least 1 each, and a block within "
                "max_span"
            )
        self.heads, self.size, self.blocks, self.causal = heads, size, max_span // size - 1, True
        self.pooling = BlockPooling(kv_heads or heads, size, project)

    @classmethod
    def build(cls, spec: HeadSpec) -> LowRank:
        p = spec.p
        return cls(spec.heads, p.size, p.max_span, kv_heads=spec.kv_heads, project=p.project)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = own_output(self, cache=False, mixed=mixed)
        reasons += refused_distances(position, "a pooled key has no position")
        if rotates(position) and self.pooling.how == "max":
            reasons.append(
                f"{type(position).__name__} rotates keys, and the maximum of rotated keys depends on where the text "
                "begins; pool them by mean or convolution, or use absolute positions"
            )
        return reasons

    def rule_needs(self) -> RuleNeeds:
        return "positions"

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, reach=(self.blocks + 1) * self.size)

    def context_length(self) -> list[int]:
        return [(self.blocks + 1) * self.size - 1] * self.heads

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        """For decoding alone: training projects earlier hidden states again, so that gradients reach the pooling."""
        return PooledBlocks(shape, self.size, self.blocks) if shape.in_place else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if others := given_terms(rule, view, TERMS):
            raise ValueError(
                f"{', '.join(others)} was given; a pooled key stands for a block of tokens, and only padding can be "
                "left out of it"
            )
        tk, first = k.shape[2], view.start // self.size
        at = (torch.arange(view.start, view.start + tk, device=k.device) // self.size) - first
        q_at = at[tk - q.shape[2] :]
        dropout = self.dropout if self.training else 0.0
        own = Rule(self.heads, reach=self.size, documents=(q_at, at)) + View(padding=view.padding).rule(self.heads)
        found = [attend(q, k, v, own, backend=self.backend, dropout=dropout)]
        if self.blocks and (view.start + tk - 1) // self.size > first:
            pooled_k, pooled_v, empty = self._pool(k, v, view)
            hidden = torch.zeros(empty.shape, device=k.device).masked_fill(empty, -torch.inf)[:, None]
            before = Rule(self.heads, skip=1, reach=self.blocks + 1, key_bias=hidden)
            places = torch.arange(pooled_k.shape[2], device=k.device)
            found.append(
                attend(
                    q, pooled_k, pooled_v, before, backend=self.backend, dropout=dropout, q_positions=q_at,
                    k_positions=places,
                )
            )  # fmt: skip
        return merge(found)

    def _pool(self, k: Tensor, v: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor]:
        """The blocks of all keys. What is missing of the first one is padding; no query sees so far."""
        missing = view.start % self.size
        if not missing:
            return self.pooling(k, v, view.padding)
        padding = (
            torch.zeros(1, k.shape[2], dtype=torch.bool, device=k.device) if view.padding is None else view.padding
        )
        k, v = (F.pad(x, (0, 0, missing, 0)) for x in (k, v))
        return self.pooling(k, v, F.pad(padding, (missing, 0), value=True))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, blocks={self.blocks}"
