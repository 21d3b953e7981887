"""Adaptive Attention Span in Transformers (Sukhbaatar, Grave, Bojanowski, Joulin, 2019).
https://arxiv.org/abs/1905.07799

    m_z(d) = clip((R + z − d) / R, 0, 1)        a_ij ∝ m_z(i − j) · exp(s_ij)        loss += λ · S · mean_h(z_h / S)

Each head h learns its span z_h ∈ [0, S], stored as the ratio z_h / S: its gradient then has a factor S, so that
one learning rate suits spans of thousands of tokens. Only the ramp, the R tokens beyond z, has a gradient, so a head
learns only about distances that already have some weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View, one_rule
from spanformer.attention.pattern.base import MOST
from spanformer.attention.span_edge_gradient import with_span_edge_gradient
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, Rule


class AdaptiveSpan(Attention):
    """One learned span per head, or per key/value head: its query heads then share the span.

    Tied spans (`kv_heads`) let a grouped KV cache drop keys that no query head of the group still sees.
    `causal=False` sees as far into the future as back: d is then |i − j|.
    `paper_compat=True` keeps the conventions of the paper's code: a token does not see itself, d counts from the
    previous token, no head sees beyond S, not even on the ramp, and a whole-number span has a gradient at its edges.
    """

    def __init__(
        self,
        heads: int,
        max_span: int,
        *,
        ramp: float = 32,
        init: float = 0.0,
        penalty: float = 2e-6,
        kv_heads: int | None = None,
        paper_compat: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_options(heads, kv_heads, max_span, ramp, penalty)
        if not 0 <= init <= 1:
            raise ValueError(f"init is {init}; expected a ratio of max_span, 0 … 1")
        self.heads, self.kv_heads, self.causal = heads, kv_heads or heads, causal
        self.max_span, self.ramp, self.penalty_weight, self.paper_compat = max_span, float(ramp), penalty, paper_compat
        self.ratio = nn.Parameter(torch.full((self.kv_heads,), float(init)))
        """[heads], or [kv_heads] when tied: z / S"""
        self.shortest = 0.0
        """the smallest span, in tokens"""
        self._read: tuple[tuple[int, int], list[float]] = ((0, 0), [])

    @classmethod
    def build(cls, spec: HeadSpec) -> AdaptiveSpan:
        return cls(
            spec.heads, spec.p.max_span, ramp=spec.p.ramp, init=spec.section.init, penalty=spec.section.penalty,
            kv_heads=spec.tied_spans, paper_compat=spec.paper_compat, causal=spec.causal,
        )  # fmt: skip

    def rule(self, view: View | None = None) -> Rule:
        span = self._spans()
        if span.device.type == "cpu" and not torch.compiler.is_compiling() and span.detach().min() < self.shortest:
            raise ValueError(
                f"span of shape {list(span.shape)} holds {float(span.detach().min())}; expected at least "
                f"{self.shortest:g}: call after_step() after every optimiser step"
            )
        return Rule(
            self.heads,
            causal=self.causal,
            span=span,
            ramp=self.ramp,
            paper_compat=self.paper_compat,
            reach=[self.max_span] * self.heads if self.paper_compat else None,
        )

    def penalty(self, rule: AnyRule | None = None, view: View | None = None) -> Tensor:
        return self.penalty_weight * self.max_span * self.ratio.mean()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        found = super().forward(q, k, v, rule, view)
        if not self.paper_compat:
            return found
        rule = one_rule(rule, "paper_compat=True")
        others = (view.q_positions, view.documents, view.padding, rule.distance_value, rule.distance_scale)
        plain = all(term is None for term in others)
        return with_span_edge_gradient(found, q, k, v, rule) if plain else found

    def span_tensor(self) -> Tensor:
        """[heads] spans in tokens, detached; on the parameter's device, so that only the caller's read is a sync."""
        return self._spans().detach()

    def context_length(self) -> list[int]:
        """[heads] how many earlier tokens each head can see now."""
        read_spans([self])
        if self.paper_compat:  # and one more at a whole-number span, for its gradient (see span_edge_gradient.py)
            each = [min(math.floor(z + self.ramp) + 1, self.max_span) for z in self._read[1]]
        else:
            each = [math.ceil(z + self.ramp) - 1 for z in self._read[1]]
        return [n for n in each for _ in range(self.heads // self.kv_heads)]

    def spans(self) -> list[float | None]:
        read_spans([self])
        return [z for z in self._read[1] for _ in range(self.heads // self.kv_heads)]

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp the spans to [shortest, max_span], without waiting for the device."""
        self.ratio.clamp_(self.shortest / self.max_span, 1)

    def _spans(self) -> Tensor:
        return self._tokens().repeat_interleave(self.heads // self.kv_heads)

    def _tokens(self) -> Tensor:
        """[heads], or [kv_heads] when tied."""
        # bfloat16 has only 8 bits for up to S tokens
        ratio = self.ratio.float() if self.ratio.dtype.itemsize < 4 else self.ratio
        return ratio * self.max_span

    def _change(self) -> tuple[int, int]:
        """A key that changes whenever the ratios are written in place or replaced."""
        return id(self.ratio), self.ratio._version

    def extra_repr(self) -> str:
        tied = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        more = (", paper_compat=True" if self.paper_compat else "") + ("" if self.causal else ", causal=False")
        price = f"penalty={self.penalty_weight:g}{more}"
        return f"heads={self.heads}{tied}, max_span={self.max_span}, ramp={self.ramp:g}, {price}"


def read_spans(mechanisms: Sequence[AdaptiveSpan]) -> None:
    """Read the ratios that changed since the last read, with one device sync for all modules.

    Changed means in place, as optimisers and `load_state_dict` do; a write through `.data` is not noticed.
    """
    stale = [m for m in mechanisms if m._read[0] != m._change()]
    if not stale:
        return
    values = torch.cat([m._tokens().detach().double() for m in stale]).tolist()
    for m in stale:
        m._read = (m._change(), values[: m.kv_heads])
        values = values[m.kv_heads :]


def check_options(heads: int, kv_heads: int | None, max_span: int, ramp: float, penalty: float) -> None:
    if heads < 1:
        raise ValueError(f"heads is {heads}; expected at least 1")
    if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        raise ValueError(f"kv_heads is {kv_heads}; expected a number that divides heads, {heads}")
    if not 1 <= max_span <= MOST:
        raise ValueError(f"max_span is {max_span}; expected 1 … {MOST:,} tokens")
    if not 0 < ramp < math.inf:
        raise ValueError(f"ramp is {ramp}; expected a positive, finite number of tokens")
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; expected at least 0 (a negative penalty would reward long spans)")
