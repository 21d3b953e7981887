"""Not All Memories are Created Equal: Learning to Forget by Expiring (Expire-Span; Sukhbaatar et al., 2021).
https://arxiv.org/abs/2105.06548

    e_j = L · σ(w·h_j + b)        m_ij = clip((R + e_j − d) / R, 0, 1)        a_ij ∝ m_ij · exp(s_ij)
    loss += α · Σ_j e_j · n_j / (R · Tq)          n_j: how many queries see memory j on its ramp, 0 < m_ij < 1

Every memory says how long it is worth remembering, the same for all heads. A memory is charged only while it expires:
before that it may still be needed. `shorten` is the paper's regularisation: while training, no memory lasts longer than
an l drawn from U(0, L) for each batch, so that the model cannot count on any certain length.

Shapes: B batch, Tq queries, Tk keys, dim of hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import check_options
from spanformer.attention.base import Attention, View, key_states, wide_linear
from spanformer.ops import Rule


class ExpireSpan(Attention):
    """`init` is the bias b: −4 starts at σ(−4) ≈ 1.8 % of max_span. w starts at zero, so all memories start alike."""

    placed = reads_keys = True

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
        self.penalty, self.shorten, self.causal = penalty, shorten, causal
        self.weight = nn.Parameter(torch.zeros(1, dim))
        """[1, dim]: w"""
        self.bias = nn.Parameter(torch.full((1,), float(init)))
        """[1]: b"""
        self._recent: tuple[Tensor, Tensor, Tensor] | None = None

    def rule(self, view: View) -> Rule:
        keys = key_states(view, self.dim)
        queries = keys.shape[1] if view.x is None else view.x.shape[1]
        span = self.max_span * wide_linear(keys, self.weight, self.bias).sigmoid()[..., 0]  # [B, Tk]
        seen = span
        if self.shorten and self.training:
            seen = span.clamp(max=self.max_span * float(torch.rand(())))  # the host's generator: nobody waits
        first = keys.shape[1] - queries - torch.arange(keys.shape[1], device=keys.device)  # to the first query
        with torch.no_grad():
            lasts = seen + self.ramp
            self._recent = span.mean(), (lasts > first + queries - 1).float().sum(1).mean(), lasts.ceil().mean()
            on_ramp = self._on_ramp(seen, first, queries)
        penalty = self.penalty * (seen * on_ramp).sum() / (self.ramp * max(queries * len(keys), 1))
        return Rule(self.heads, causal=self.causal, key_span=seen[:, None], ramp=self.ramp, penalty=penalty)

    def _on_ramp(self, span: Tensor, first: Tensor, queries: int) -> Tensor:
        """[B, Tk] how many of the queries, at distances first … first + queries − 1, see a memory on its ramp."""
        near, far = span.floor() + 1, (span + self.ramp).ceil() - 1
        count = (torch.minimum(far, first + queries - 1) - torch.maximum(near, first) + 1).clamp(min=0)
        if self.causal:
            return count
        return count + (torch.minimum(-near, first + queries - 1) - torch.maximum(-far, first) + 1).clamp(min=0)

    def lookback(self) -> list[int]:
        """[heads] the most any memory may last; which do is known only when they are there."""
        return [math.ceil(self.max_span + self.ramp) - 1] * self.heads

    def learned(self) -> list[float | None]:
        """[heads] the average over the memories last read."""
        return [None if self._recent is None else float(self._recent[0])] * self.heads

    def looked(self) -> list[int]:
        """[heads] over a long text a token sees as many memories as one lasts."""
        return super().looked() if self._recent is None else [round(float(self._recent[2]))] * self.heads

    def alive(self) -> float | None:
        """How many of the memories last read the newest token still sees, on average over the batch."""
        return None if self._recent is None else float(self._recent[1])

    def extra_repr(self) -> str:
        more = (", shorten=True" if self.shorten else "") + ("" if self.causal else ", causal=False")
        sizes = f"dim={self.dim}, heads={self.heads}, max_span={self.max_span}"
        return f"{sizes}, ramp={self.ramp:g}, penalty={self.penalty:g}{more}"
