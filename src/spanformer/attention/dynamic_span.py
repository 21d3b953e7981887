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
from spanformer.attention.base import Attention, View, wide_linear
from spanformer.ops import Rule


class DynamicSpan(Attention):
    """A span for every token and head (or key/value head, tied), read off the token's hidden state.

    `init` is the bias b, the same for every head: −4 starts at σ(−4) ≈ 1.8 % of max_span. v starts at zero,
    so all tokens start alike; unlike a hidden layer's, its gradient is not zero there.
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
        self.max_span, self.ramp, self.penalty = max_span, float(ramp), penalty
        self.weight = nn.Parameter(torch.zeros(self.kv_heads, dim))
        """[heads or kv_heads, dim]: v"""
        self.bias = nn.Parameter(torch.full((self.kv_heads,), float(init)))
        """[heads or kv_heads]: b"""
        self._recent: Tensor | None = None

    def rule(self, view: View) -> Rule:
        if not isinstance(view, View):
            raise ValueError(f"view is of type {type(view).__name__}; expected View(x=hidden states [B, Tq, dim])")
        if view.x is None:
            raise ValueError("view.x is missing; a dynamic span is read off the hidden states [B, Tq, dim]")
        if view.x.ndim != 3 or view.x.shape[2] != self.dim:
            raise ValueError(f"view.x has shape {list(view.x.shape)}; expected [B, Tq, {self.dim}]")
        span = self._spans(view.x)
        recent = span.detach()
        self._recent = torch.stack([recent.mean((0, 2)), (recent + self.ramp).ceil().mean((0, 2))])
        return Rule(self.heads, causal=self.causal, span=span, ramp=self.ramp, penalty=self.penalty * span.mean())

    def lookback(self) -> list[int]:
        """[heads] the most any token may look back; which tokens do is known only when they are there."""
        return [math.ceil(self.max_span + self.ramp) - 1] * self.heads

    def learned(self) -> list[float | None]:
        """[heads] the average over the tokens last read."""
        return [None] * self.heads if self._recent is None else self._recent[0].tolist()

    def looked(self) -> list[int]:
        return super().looked() if self._recent is None else [round(n) for n in self._recent[1].tolist()]

    def _spans(self, x: Tensor) -> Tensor:
        """[B, H, Tq] in tokens."""
        z = self.max_span * wide_linear(x, self.weight, self.bias).sigmoid()
        return z.transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1)

    def extra_repr(self) -> str:
        tied = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        return (
            f"dim={self.dim}, heads={self.heads}{tied}, max_span={self.max_span}, "
            f"ramp={self.ramp:g}, penalty={self.penalty:g}"
        )
