"""Forgetting Transformer: Softmax Attention with a Forget Gate (Lin et al., 2025). https://arxiv.org/abs/2503.02130

    f_t = σ(w_f·x_t + b_f)        s_ij += Σ_{l = j+1 … i} log f_l = c_i − c_j        c_t = Σ_{l ≤ t} log f_l

Every token has a forget gate per head, which scales down all earlier tokens. The gates encode order, so the paper uses
no position encodings. Shapes: B batch, H heads, Tk keys, dim of hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spanformer.attention.base import Attention, RuleNeeds, View, key_states, wide_linear
from spanformer.kinds import HeadSpec
from spanformer.ops import Rule


class Forgetting(Attention):
    """`max_span`: the most tokens a head sees, itself included (forgotten tokens cost as much as others).
    `init` is the bias b_f: 0 starts with gates of about ½, as in the paper; a larger bias forgets less."""

    def __init__(self, dim: int, heads: int, max_span: int, *, init: float = 0.0) -> None:
        super().__init__()
        if dim < 1 or heads < 1 or max_span < 1:
            raise ValueError(f"dim is {dim}, heads {heads} and max_span {max_span}; expected at least 1 each")
        self.dim, self.heads, self.max_span = dim, heads, max_span
        self.weight = nn.Parameter(torch.randn(heads, dim) / dim**0.5)
        """[H, dim]: w_f"""
        self.bias = nn.Parameter(torch.full((heads,), float(init)))
        """[H]: b_f"""

    @classmethod
    def build(cls, spec: HeadSpec) -> Forgetting:
        return cls(spec.dim, spec.heads, spec.p.max_span)

    def rule_needs(self) -> RuleNeeds:
        return "states"

    def rule(self, view: View) -> Rule:
        gates = F.logsigmoid(wide_linear(key_states(view, self.dim), self.weight, self.bias))  # [B, Tk, H]
        # in float64: c grows with the text, and only its differences are used
        return Rule(self.heads, reach=self.max_span, forget=gates.double().cumsum(1).transpose(1, 2))

    def context_length(self) -> list[int]:
        return [self.max_span - 1] * self.heads

    def extra_repr(self) -> str:
        return f"dim={self.dim}, heads={self.heads}, max_span={self.max_span}"
