"""Not All Memories are Created Equal: Learning to Forget by Expiring (Expire-Span; Sukhbaatar et al., 2021).
https://arxiv.org/abs/2105.06548

    e_j = L · σ(w·h_j + b)        m_ij = clip((R + e_j − d) / R, 0, 1)        a_ij ∝ m_ij · exp(s_ij)
    loss += α · Σ_j e_j · n_j / (R · Tq)          n_j: the number of queries with j on the ramp, 0 < m_ij < 1

Every memory has an expiration span e_j, the same for all heads. The loss penalises a memory only while it expires:
before that it may still be needed. `shorten` is the paper's regularisation: in training, no memory lasts longer than an
l sampled from U(0, L) for each batch, so that the model does not rely on a fixed length.

Shapes: B batch, Tq queries, Tk keys, dim of hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import check_options
from spanformer.attention.base import Attention, RuleNeeds, View, key_states, one_rule, wide_linear
from spanformer.attention.dynamic_span import first_bias
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Rule


class ExpireSpan(Attention):
    """`init` is the bias b: −4 starts at σ(−4) ≈ 1.8 % of max_span. w starts at zero, so all memories start with the
    same span."""

    def __init__(
        self,
        dim: int,
        heads: int,
        max_span: int,
        *,
        ramp: float = 32,
        init: float = -4.0,
        penalty: float = 1e-6,
        shorten: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_options(heads, None, max_span, ramp, penalty)
        self.dim, self.heads, self.max_span, self.ramp = dim, heads, max_span, float(ramp)
        self.penalty_weight, self.shorten, self.causal = penalty, shorten, causal
        self.weight = nn.Parameter(torch.zeros(1, dim))
        """[1, dim]: w"""
        self.bias = nn.Parameter(torch.full((1,), float(init)))
        """[1]: b"""
        self._recent: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def build(cls, spec: HeadSpec) -> ExpireSpan:
        return cls(
            spec.dim, spec.heads, spec.p.max_span, ramp=spec.p.ramp, init=first_bias(spec.section.init),
            penalty=spec.section.penalty, causal=spec.causal,
        )  # fmt: skip

    def rule_needs(self) -> RuleNeeds:
        return "states"

    def rule(self, view: View) -> Rule:
        keys = key_states(view, self.dim)
        span = self.max_span * wide_linear(keys, self.weight, self.bias).sigmoid()[..., 0]  # [B, Tk]
        seen = span
        if self.shorten and self.training:
            seen = span.clamp(max=self.max_span * float(torch.rand(())))  # the host's generator: no sync
        with torch.no_grad():
            lasts, oldest = seen + self.ramp, torch.arange(keys.shape[1] - 1, -1, -1, device=keys.device)
            self._recent = span.mean(), (lasts > oldest).float().sum(1).mean(), lasts.ceil().mean()
        return Rule(self.heads, causal=self.causal, key_span=seen[:, None], ramp=self.ramp)

    def penalty(self, rule: AnyRule, view: View) -> Tensor:
        of_keys = one_rule(rule, "ExpireSpan").key_span
        assert of_keys is not None
        span = of_keys[:, 0]  # [B, Tk], the same for all heads
        queries = span.shape[1] if view.x is None else view.x.shape[1]
        with torch.no_grad():
            on_ramp = self._on_ramp(span, queries)
        return self.penalty_weight * (span * on_ramp).sum() / (self.ramp * max(queries * len(span), 1))

    def _on_ramp(self, span: Tensor, queries: int) -> Tensor:
        """[B, Tk] how many of the queries, which are the last keys, have each memory on its ramp."""
        first = span.shape[1] - queries - torch.arange(span.shape[1], device=span.device)  # distance of the first query
        near, far = span.floor() + 1, (span + self.ramp).ceil() - 1
        count = (torch.minimum(far, first + queries - 1) - torch.maximum(near, first) + 1).clamp(min=0)
        if self.causal:
            return count
        return count + (torch.minimum(-near, first + queries - 1) - torch.maximum(-far, first) + 1).clamp(min=0)

    def context_length(self) -> list[int]:
        """[heads] the longest span that a memory may have; the actual spans depend on hidden states."""
        return [math.ceil(self.max_span + self.ramp) - 1] * self.heads

    def spans(self) -> list[float | None]:
        """[heads] the average over the latest memories."""
        return [None if self._recent is None else float(self._recent[0])] * self.heads

    def mean_context(self) -> list[int]:
        """[heads] the average lifetime of a memory, which in a long text is how many a token sees."""
        return super().mean_context() if self._recent is None else [round(float(self._recent[2]))] * self.heads

    def alive(self) -> float | None:
        """How many of the latest memories the newest token still sees, on average over the batch."""
        return None if self._recent is None else float(self._recent[1])

    def extra_repr(self) -> str:
        more = (", shorten=True" if self.shorten else "") + ("" if self.causal else ", causal=False")
        sizes = f"dim={self.dim}, heads={self.heads}, max_span={self.max_span}"
        return f"{sizes}, ramp={self.ramp:g}, penalty={self.penalty_weight:g}{more}"
