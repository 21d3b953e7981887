"""Attention sinks: a head can put unneeded weight on them, so that short windows stay stable.

a_ij = exp(s_ij) / (exp(sink_h) + Σ_r exp(s_ir))       learned: gpt-oss (OpenAI, 2025), after Miller (2023)
                                                       https://arxiv.org/abs/2508.10925
i also sees j = 0 … sink_tokens − 1, whatever its window      tokens: StreamingLLM (Xiao et al., 2023)
                                                       https://arxiv.org/abs/2309.17453
"""

from __future__ import annotations

import torch
from torch import nn

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import Attention, View
from spanformer.attention.pattern.base import at_least
from spanformer.attention.window import Window
from spanformer.attention.wrapper import Wrapper
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Rule


class Sinks(Wrapper):
    """Sinks for the heads of another mechanism, for instance a window or learned spans.

    learned: a logit for each head, which starts at 0. sink_tokens: this many first tokens of the text stay visible.
    They keep their positions, so that the distance to them grows with the text (StreamingLLM counts positions within
    its cache). A KV cache stores them beside its rings (`LM.decode`); segments work until the segment memory drops
    them.
    """

    def __init__(self, inner: Attention, *, learned: bool = True, sink_tokens: int = 0) -> None:
        super().__init__(inner)
        at_least("sink_tokens", sink_tokens, 0)
        if not learned and not sink_tokens:
            raise ValueError("learned is False and sink_tokens 0; expected a learned sink, sink tokens, or both")
        self.sink_tokens = max(sink_tokens, inner.sink_tokens)
        self.sink_logits = nn.Parameter(torch.zeros(self.heads)) if learned else None
        """[H]"""

    @classmethod
    def build_window(cls, spec: HeadSpec) -> Sinks:
        return cls(Window.build(spec), sink_tokens=spec.p.sink_tokens)

    @classmethod
    def build_span(cls, spec: HeadSpec) -> Sinks:
        return cls(AdaptiveSpan.build(spec), sink_tokens=spec.p.sink_tokens)

    def rule(self, view: View) -> AnyRule:
        rule = self.inner.rule(view)
        return rule + Rule(self.heads, causal=rule.causal, sink_logits=self.sink_logits, sink_tokens=self.sink_tokens)

    def extra_repr(self) -> str:
        return f"learned={self.sink_logits is not None}, sink_tokens={self.sink_tokens}"
