"""A fixed window: every head sees the same number of tokens, itself included, and none is learned.

Local attention, as in Longformer (Beltagy et al., 2020), https://arxiv.org/abs/2004.05150

    a_ij ∝ exp(s_ij)   for 0 ≤ i − j < w        (w = the longest memory: full causal attention)      O(n·w) pairs
                       for |i − j| < w          with causal=False

For different numbers of tokens before and after: Patterned(heads, pattern.Window(before, after), causal=False).
"""

from __future__ import annotations

from spanformer.attention.base import Attention, View
from spanformer.attention.pattern.base import at_least
from spanformer.kinds import HeadSpec
from spanformer.ops import Rule


class Window(Attention):
    """`paper_compat=True` counts like the adaptive-span paper's code: the w tokens before a token, without
    itself."""

    def __init__(self, heads: int, window: int, *, paper_compat: bool = False, causal: bool = True) -> None:
        super().__init__()
        at_least("window", window, 1)
        self.heads, self.window, self.paper_compat, self.causal = heads, window, paper_compat, causal

    @classmethod
    def build(cls, spec: HeadSpec) -> Window:
        return cls(spec.heads, spec.p.window, paper_compat=spec.paper_compat, causal=spec.causal)

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=self.causal, reach=self.window, paper_compat=self.paper_compat)

    def context_length(self) -> list[int]:
        return [self.window - (not self.paper_compat)] * self.heads

    def extra_repr(self) -> str:
        said = (", paper_compat=True" if self.paper_compat else "") + ("" if self.causal else ", causal=False")
        return f"heads={self.heads}, window={self.window}{said}"
