"""Adaptive Attention Span in Transformers (Sukhbaatar, Grave, Bojanowski, Joulin, 2019).
https://arxiv.org/abs/1905.07799

    m_z(d) = clip((R + z − d) / R, 0, 1)        a_ij ∝ m_z(i − j) · exp(s_ij)        loss += λ · S · mean_h(z_h / S)

Each head h learns its span z_h ∈ [0, S], stored as the ratio z_h / S: its gradient then carries S, which is what
lets one learning rate serve spans of thousands of tokens. The gradient lives on the ramp, the R tokens beyond z,
so a head only finds out about distances it can already faintly see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View
from spanformer.attention.kinks import with_kinks
from spanformer.attention.pattern.base import MOST
from spanformer.ops import Attended, Rule


class AdaptiveSpan(Attention):
    """One learned span per head, or per key/value head, all of whose query heads then share it.

    Tied spans (`kv_heads`) let a grouped key/value cache forget what no query head of the group still sees.
    `causal=False` looks as far ahead as back: d is then |i − j|.
    `original=True` keeps the conventions of the paper's code: a token does not see itself, d counts from the
    previous token, nothing beyond S is seen even on the ramp, and a whole span has a gradient at its kinks.
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
        original: bool = False,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_options(heads, kv_heads, max_span, ramp, penalty)
        if not 0 <= init <= 1:
            raise ValueError(f"init is {init}; expected a ratio of max_span, 0 … 1")
        self.heads, self.kv_heads, self.causal = heads, kv_heads or heads, causal
        self.max_span, self.ramp, self.penalty, self.original = max_span, float(ramp), penalty, original
        self.ratio = nn.Parameter(torch.full((self.kv_heads,), float(init)))
        """[heads], or [kv_heads] when tied: z / S"""
        self._read: tuple[tuple[int, int], list[float]] = ((0, 0), [])

    def rule(self, view: View | None = None) -> Rule:
        return Rule(
            self.heads,
            causal=self.causal,
            span=self._spans(),
            ramp=self.ramp,
            penalty=self.penalty * self.max_span * self.ratio.mean(),
            original=self.original,
            reach=[self.max_span] * self.heads if self.original else None,
        )

    def mix(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View) -> Attended:
        found = super().mix(q, k, v, rule, view)
        others = (view.q_positions, view.documents, view.padding, rule.distance_value, rule.distance_scale)
        plain = all(term is None for term in others)
        return with_kinks(found, q, k, v, rule) if self.original and plain else found

    def spans(self) -> Tensor:
        """[heads] spans in tokens, detached; on the parameter's device, so reading them is the caller's sync."""
        return self._spans().detach()

    def lookback(self) -> list[int]:
        """[heads] how many earlier tokens each head can see now."""
        read_spans([self])
        if self.original:  # and one more at a whole span, whose gradient takes part (see kinks.py)
            each = [min(math.floor(z + self.ramp) + 1, self.max_span) for z in self._read[1]]
        else:
            each = [math.ceil(z + self.ramp) - 1 for z in self._read[1]]
        return [n for n in each for _ in range(self.heads // self.kv_heads)]

    def learned(self) -> list[float | None]:
        read_spans([self])
        return [z for z in self._read[1] for _ in range(self.heads // self.kv_heads)]

    @torch.no_grad()
    def after_step(self) -> None:
        """Clamp the ratios to [0, 1], without waiting for the device."""
        self.ratio.clamp_(0, 1)

    def _spans(self) -> Tensor:
        return self._tokens().repeat_interleave(self.heads // self.kv_heads)

    def _tokens(self) -> Tensor:
        """[heads], or [kv_heads] when tied."""
        ratio = self.ratio.float() if self.ratio.dtype.itemsize < 4 else self.ratio  # bfloat16 has 8 bits for S tokens
        return ratio * self.max_span

    def _change(self) -> tuple[int, int]:
        """Differs whenever the ratios were written in place or replaced."""
        return id(self.ratio), self.ratio._version

    def extra_repr(self) -> str:
        tied = f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else ""
        kept = (", original=True" if self.original else "") + ("" if self.causal else ", causal=False")
        return f"heads={self.heads}{tied}, max_span={self.max_span}, ramp={self.ramp:g}, penalty={self.penalty:g}{kept}"


def read_spans(mechanisms: Sequence[AdaptiveSpan]) -> None:
    """Read the ratios that changed since they were last read, all in one wait for the device; `lookback` then knows.

    Changed means in place, as optimisers and `load_state_dict` do; a write through `.data` goes unnoticed.
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
        raise ValueError(f"max_span is {max_span}; expected at least 1 token, and {MOST:,} at most")
    if not 0 < ramp < math.inf:
        raise ValueError(f"ramp is {ramp}; expected a positive, finite number of tokens")
    if not 0 <= penalty < math.inf:
        raise ValueError(f"penalty is {penalty}; expected 0 or more (a negative one would reward long spans)")
