"""Dynamic spans, from Adaptive Attention Span in Transformers (Sukhbaatar, Grave, Bojanowski, Joulin, 2019), §2.
https://arxiv.org/abs/1905.07799

    z_t = S · σ(v·x_t + b)        m_z(d) = clip((R + z − d) / R, 0, 1)        loss += λ · mean(z)

Every token chooses, per head, how far back it looks. Shapes: B batch, H heads, Tq queries, dim of hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import check_options
from spanformer.attention.base import Attention, View, one_rule, wide_linear
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Rule

LEAST = 0.018
"""share of max_span: a dynamic span is a sigmoid, which has no gradient at zero"""


def first_bias(share: float) -> float:
    """The bias with which the sigmoid starts at this share of the longest span."""
    share = min(max(share, LEAST), 1 - LEAST)
    return math.log(share / (1 - share))


class DynamicSpan(Attention):
    """A span for every token and head (or key/value head, tied), computed from the token's hidden state.

    `init` is the bias b, the same for every head: −4 starts at σ(−4) ≈ 1.8 % of max_span. v starts at zero,
    so all tokens start with the same span; the gradient of v is not zero there.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        max_span: int,
        *,
        ramp: float = 32,
        init: float = -4.0,
        penalty: float = 2e-6,
        kv_heads: int | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_options(heads, kv_heads, max_span, ramp, penalty)
        if dim < 1:
            raise ValueError(f"dim is {dim}; expected at least 1")
        self.dim, self.heads, self.kv_heads, self.causal = dim, heads, kv_heads or heads, causal
        self.max_span, self.ramp, self.penalty_weight = max_span, float(ramp), penalty
        self.weight = nn.Parameter(torch.zeros(self.kv_heads, dim))
        """[heads or kv_heads, dim]: v"""
        self.bias = nn.Parameter(torch.full((self.kv_heads,), float(init)))
        """[heads or kv_heads]: b"""
        self._recent: Tensor | None = None

    @classmethod
    def build(cls, spec: HeadSpec) -> DynamicSpan:
        return cls(
            spec.dim, spec.heads, spec.p.max_span, ramp=spec.p.ramp, init=first_bias(spec.section.init),
            penalty=spec.section.penalty, kv_heads=spec.tied_spans, causal=spec.causal,
        )  # fmt: skip

    def rule(self, view: View) -> Rule:
        if not isinstance(view, View):
            raise ValueError(f"view is of type {type(view).__name__}; expected View(x=hidden states [B, Tq, dim])")
        if view.x is None:
            raise ValueError("view.x is missing; dynamic spans need the hidden states [B, Tq, dim]")
        if view.x.ndim != 3 or view.x.shape[2] != self.dim:
            raise ValueError(f"view.x has shape {list(view.x.shape)}; expected [B, Tq, {self.dim}]")
        span = self.spans_of(view.x)
        recent = span.detach()
        self._recent = torch.stack([recent.mean((0, 2)), (recent + self.ramp).ceil().mean((0, 2))])
        return Rule(self.heads, causal=self.causal, span=span, ramp=self.ramp)

    def penalty(self, rule: AnyRule, view: View) -> Tensor:
        span = one_rule(rule, "DynamicSpan").span
        assert span is not None
        return self.penalty_weight * span.mean()

    def context_length(self) -> list[int]:
        """[heads] the longest span that a token may choose; the actual spans depend on hidden states."""
        return [math.ceil(self.max_span + self.ramp) - 1] * self.heads

    def spans(self) -> list[float | None]:
        """[heads] the average over the latest tokens."""
        return [None] * self.heads if self._recent is None else self._recent[0].tolist()

    def recent_average(self) -> Tensor | None:
        """[heads], or [kv_heads] when tied: spans in tokens, averaged over the latest tokens; None before the first."""
        return None if self._recent is None else self._recent[0, :: self.heads // self.kv_heads]

    def mean_context(self) -> list[int]:
        return super().mean_context() if self._recent is None else [round(n) for n in self._recent[1].tolist()]

    def spans_of(self, x: Tensor) -> Tensor:
        """[B, H, Tq] in tokens, of queries with the hidden states x [B, Tq, dim]."""
        z = self.max_span * wide_linear(x, self.weight, self.bias).sigmoid()
        return z.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)

    def extra_repr(self) -> str:
        tied = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return (
            f"dim={self.dim}, heads={self.heads}{tied}, max_span={self.max_span}, "
            f"ramp={self.ramp:g}, penalty={self.penalty_weight:g}"
        )
