"""A dilated window: w tokens, step positions apart, so that a head sees step times as far at the same cost.

Longformer (Beltagy et al., 2020), https://arxiv.org/abs/2004.05150, section 3.1

    a_ij ∝ exp(s_ij)   for i − j = 0, s, 2s, …, (w − 1)·s if causal, else also the future        O(n·w) pairs

Tokens are folded into s classes that do not see each other, and each is an ordinary window: skipped pairs are
never computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanformer.attention.pattern import Dilated
from spanformer.attention.patterned import Patterned
from spanformer.kinds import HeadSpec


class DilatedWindow(Patterned):
    """window: tokens on each side, itself included. step: one number, or one for each head (1: an ordinary window)."""

    def __init__(self, heads: int, window: int, step: int | Sequence[int], *, causal: bool = True) -> None:
        steps = [step] * heads if isinstance(step, int) else list(step)
        super().__init__(heads, [Dilated(window, s) for s in steps], causal=causal)

    @classmethod
    def build(cls, spec: HeadSpec) -> DilatedWindow:
        return cls(spec.heads, spec.p.window, spec.p.step, causal=spec.causal)
