"""Full attention: every token sees every other, or every earlier one.

Attention Is All You Need (Vaswani et al., 2017), https://arxiv.org/abs/1706.03762

    a_ij ∝ exp(q_i·k_j / √D)   for j ≤ i if causal, else for all j            O(n²) pairs
"""

from __future__ import annotations

from spanformer.attention.pattern import Full as Everything
from spanformer.attention.patterned import Patterned
from spanformer.attention.window import Window
from spanformer.kinds import HeadSpec


class Full(Patterned):
    """longest: the most tokens a head sees, itself included, if memory is bounded."""

    def __init__(self, heads: int, *, causal: bool = True, longest: int | None = None) -> None:
        super().__init__(heads, Everything(), causal=causal, longest=longest)


def build(spec: HeadSpec) -> Window:
    """A model's memory is bounded by max_span, so full attention is a window of that length."""
    return Window(spec.heads, spec.p.max_span, paper_compat=spec.paper_compat, causal=spec.causal)
