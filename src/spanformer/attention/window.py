"""A fixed window: every head sees the same number of tokens, itself included, and none is learned.

Local attention, as in Longformer (Beltagy et al., 2020), https://arxiv.org/abs/2004.05150

    a_ij ∝ exp(s_ij)   for 0 ≤ i − j < w        (w = the longest memory: full causal attention)      O(n·w) pairs
                       for |i − j| < w          with causal=False

Another number of tokens before than after: Patterned(heads, pattern.Window(before, after), causal=False).
"""

from __future__ import annotations

from spanformer.attention.base import Attention, View
from spanformer.attention.pattern.base import at_least
from spanformer.ops import Rule


class Window(Attention):
    """`original=True` counts as the adaptive-span paper's code does: the w tokens before a token, without itself."""

    def __init__(self, heads: int, window: int, *, original: bool = False, causal: bool = True) -> None:
        super().__init__()
        at_least("window", window, 1)
        self.heads, self.window, self.original, self.causal = heads, window, original, causal

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=self.causal, reach=self.window, original=self.original)

    def lookback(self) -> list[int]:
        return [self.window - (not self.original)] * self.heads

    def extra_repr(self) -> str:
        said = (", original=True" if self.original else "") + ("" if self.causal else ", causal=False")
        return f"heads={self.heads}, window={self.window}{said}"
