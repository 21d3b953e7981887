"""A fixed window: every head sees the same number of tokens, itself included, and none is learned.

Local attention, as in Longformer (Beltagy et al., 2020), https://arxiv.org/abs/2004.05150

    a_ij ∝ exp(s_ij)   for 0 ≤ i − j < w where causal, else for |i − j| < w        O(n·w) pairs

(w = the longest memory: full causal attention; another number of tokens before than after: Patterned(Window(b, a)).)
"""

from __future__ import annotations

from spanformer.attention.base import Attention, View
from spanformer.ops import Rule


class Window(Attention):
    """`causal=False` looks as far ahead as back. `original=True` counts as the adaptive-span paper's code does: the w
    tokens before a token, without itself."""

    def __init__(self, heads: int, window: int, *, causal: bool = True, original: bool = False) -> None:
        super().__init__()
        if window < 1:
            raise ValueError(f"window is {window}; expected at least 1 token")
        self.heads, self.window, self.causal, self.original = heads, window, causal, original

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=self.causal, reach=self.window, original=self.original)

    def lookback(self) -> list[int]:
        return [self.window - (not self.original)] * self.heads

    def extra_repr(self) -> str:
        flags = ("" if self.causal else ", causal=False") + (", original=True" if self.original else "")
        return f"heads={self.heads}, window={self.window}{flags}"
