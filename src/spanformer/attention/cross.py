"""Attention of a decoder's queries over an encoder's states (Attention Is All You Need, Vaswani et al., 2017, §3.2.3).
https://arxiv.org/abs/1706.03762

    a_ij = softmax_j(q_i·k_j / √D) over the encoder's tokens that are not padding

The two texts have no common positions, so there is no distance: every query sees every key.
"""

from __future__ import annotations

from torch import Tensor

from spanformer.attention.base import Attention, View, given_terms
from spanformer.ops import AnyRule, Attended, Rule

# terms without distances; the ramp is unused without a span
TERMS = ("heads", "causal", "ramp", "key_bias", "sink_logits")


class Cross(Attention):
    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; expected at least 1")
        self.heads, self.causal = heads, False

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=False)

    def context_length(self) -> list[int]:
        raise ValueError("cross-attention has no context length: its keys are the encoder's states")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """view: the encoder's padding [B, Tk], and no positions."""
        distant = given_terms(rule, view, TERMS)
        distant += ["causal=True"] if rule.causal else []
        distant += ["positions"] if view.q_positions is not None or view.k_positions is not None else []
        if distant:
            raise ValueError(
                f"{', '.join(distant)} depends on distances, which cross-attention does not have; set it in "
                "self-attention only"
            )
        return super().forward(q, k, v, rule, view)
