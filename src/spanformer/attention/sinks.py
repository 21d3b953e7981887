"""Attention sinks: somewhere for a head to put the weight it does not need, so that a short window stays steady.

a_ij = exp(s_ij) / (exp(sink_h) + Σ_r exp(s_ir))       learned: gpt-oss (OpenAI, 2025), after Miller (2023)
                                                       https://arxiv.org/abs/2508.10925
i also sees j = 0 … kept − 1, whatever its window      tokens: StreamingLLM (Xiao et al., 2023)
                                                       https://arxiv.org/abs/2309.17453
"""

from __future__ import annotations

import torch
from torch import nn

from spanformer.attention.around import Around
from spanformer.attention.base import Attention, View
from spanformer.attention.pattern.base import at_least
from spanformer.ops import Rule


class Sinks(Around):
    """Sinks for the heads of another mechanism, for instance a window or learned spans.

    learned: a score for each head, which starts at 0. kept: so many first tokens of the text stay in sight. They keep
    their positions, so that the distance to them grows with the text (StreamingLLM counts positions within its cache).
    A cache holds them beside its rings (`LM.read`); segments with a memory can be read until that forgets them.
    """

    def __init__(self, inner: Attention, *, learned: bool = True, kept: int = 0) -> None:
        super().__init__(inner)
        at_least("kept", kept, 0)
        if not learned and not kept:
            raise ValueError("learned is False and kept 0; expected a learned sink, kept tokens, or both")
        self.kept = max(kept, inner.kept)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if learned else None
        """[H]"""

    def rule(self, view: View) -> Rule:
        rule = self.inner.rule(view)
        return rule + Rule(self.heads, causal=rule.causal, sinks=self.sinks, kept=self.kept)

    def extra_repr(self) -> str:
        return f"learned={self.sinks is not None}, kept={self.kept}"
