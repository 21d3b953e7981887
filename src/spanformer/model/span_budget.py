"""Holds what a language model's attention costs at a share of full attention's, while it trains.

A head with span z and ramp R computes w = ⌈z + R⌉ distances of max_span. The budget fixes their sum over all heads.
Heads with learned spans divide what the others leave, by the controller of `fit-spans` (budget.py): each step adds the
price λ of a token to the loss's slopes, so that tokens move to the heads which gain most by them, and one factor
for all windows then restores the sum. A dynamic span has a window for every token: their average counts, and the bias
of its sigmoid is moved.

Shapes: N spans that learn, of all layers (one for each head, or for each key/value head if they are tied).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spanformer.attention import AdaptiveSpan, Attention, DynamicSpan
from spanformer.attention.parts import Parts
from spanformer.attention.sinks import Sinks
from spanformer.core.checks import finite_number
from spanformer.model.budget import Budget, Price
from spanformer.model.stack import TransformerStack

WITHIN = 1e-3
"""share of max_span that a dynamic span's average stays away from 0 and max_span, where a sigmoid has no slope"""
Spans = AdaptiveSpan | DynamicSpan
Mean = Callable[[Tensor], Tensor]


class SpanBudget:
    """Sets the model's spans to the budget, and again after every step."""

    def __init__(self, model: TransformerStack, share: float, mean: Mean) -> None:
        """mean: averages a tensor over the processes that train together."""
        self.model, self.share, self.mean = model, share, mean
        self.parts = learned_parts(model, share)
        if any(isinstance(m, DynamicSpan) and hasattr(m.bias, "full_tensor") for m in self.parts):
            raise ValueError(
                f"model.attention.budget is {share:g} with dynamic spans, whose biases fsdp shards; use train.engine "
                "ddp"
            )
        self.budget = self._divide()
        self.price = Price(0.0)
        self._restore(self._windows())

    def _divide(self) -> Budget:
        """The budget of the heads that learn: what the others leave."""
        config, most = self.model.config, self.model.config.attention.max_span
        heads, fixed = config.own_blocks * config.heads, self._fixed()
        least, longest = sum(m.ramp * m.heads for m in self.parts), sum(m.max_span * m.heads for m in self.parts)
        left = self.share * heads * most - fixed
        asked = f"model.attention.budget is {self.share:g}, {self.share * most:,.1f} of {most:,} tokens a head"
        beside = f", and heads without a learned span {fixed / heads:,.1f} more" if fixed else ""
        if left < least:
            raise ValueError(
                f"{asked}, but the ramps of the spans take {least / heads:,.1f}{beside}; expected "
                f"{math.ceil((fixed + least) / heads / most * 1e4) / 1e4:g} or more, or a shorter model.attention.ramp"
            )
        if left > longest:
            raise ValueError(
                f"{asked}, but the longest spans take {longest / heads:,.1f}{beside}; expected "
                f"{math.floor((fixed + longest) / heads / most * 1e4) / 1e4:g} or less, or longer spans"
            )
        rounded = sum(m.heads for m in self.parts) / 2  # a window is rounded up to whole tokens: half of one on average
        left = max(least, left - rounded) if left < longest else left
        return Budget(left / longest, max(m.max_span for m in self.parts), 0,
                      tuple(m.max_span for m in self.parts for _ in range(m.kv_heads)))  # fmt: skip

    def _fixed(self) -> int:
        """Distances that heads without a learned span compute, of one block after the other."""
        most = self.model.config.attention.max_span
        fixed = [part for part in head_parts(self.model) if not isinstance(part, Spans)]
        return sum(min(n, most) for part in fixed for n in part.mean_context())

    def slopes(self) -> Tensor | None:
        """[N] the loss's derivatives by each window, without the price; call it after the backward pass, before
        gradients are clipped. None: no gradient reached the spans."""
        found = []
        for m in self.parts:
            by = m.ratio if isinstance(m, AdaptiveSpan) else m.bias
            if by.grad is None:
                return None
            found.append(by.grad.double() / self._per_token(m) - m.penalty_weight / m.kv_heads)
        return torch.cat(found)

    def _per_token(self, m: Spans) -> float | Tensor:
        """Derivative of the average span by the parameter that moves it."""
        if isinstance(m, AdaptiveSpan):
            return m.max_span
        share = self._average(m) / m.max_span
        return m.max_span * share * (1 - share)

    def after_step(self, slopes: Tensor | None) -> None:
        """Find the next price, and restore the budget; call it after the optimiser's step with the slopes before it."""
        if slopes is not None:
            self._set_price(self.price.step(slopes))
        self._restore(self._windows())

    def _set_price(self, price: float) -> None:
        self.price.weight = price
        for m in self.parts:  # a penalty is for the mean of a part's spans, and the price for each token
            m.penalty_weight = price * m.kv_heads

    def _windows(self) -> Tensor:
        """[N] z + R, of dynamic spans the average."""
        return torch.cat([self._average(m) + m.ramp for m in self.parts])

    def _average(self, m: Spans) -> Tensor:
        """[kv_heads] spans in tokens; of dynamic ones, the average over the latest tokens of all processes."""
        if isinstance(m, AdaptiveSpan):
            return m.ratio.detach().double() * m.max_span
        recent = m.recent_average()
        span = m.bias.detach().sigmoid() * m.max_span if recent is None else self.mean(recent.double().clone())
        return span.double().clamp(WITHIN * m.max_span, (1 - WITHIN) * m.max_span)

    @torch.no_grad()
    def _restore(self, windows: Tensor) -> None:
        ramps = torch.cat([torch.full((m.kv_heads,), m.ramp, dtype=torch.float64) for m in self.parts])[:, None]
        fitted = self.budget.fit(windows[:, None].cpu(), shortest=ramps, spare=ramps)[:, 0].to(windows.device)
        for m, new, old in zip(self.parts, *(t.split([m.kv_heads for m in self.parts]) for t in (fitted, windows)),
                               strict=True):  # fmt: skip
            if isinstance(m, AdaptiveSpan):
                m.ratio.copy_(((new - m.ramp) / m.max_span).clamp(0, 1))
            else:
                before, after = ((w - m.ramp).div(m.max_span).clamp(WITHIN, 1 - WITHIN) for w in (old, new))
                m.bias.add_(after.logit() - before.logit())

    def share_now(self) -> float:
        """The share of full attention's distances that heads compute."""
        seen = [n for mechanism in dict.fromkeys(self.model.mechanisms()) for n in mechanism.mean_context()]
        most = self.model.config.attention.max_span
        return sum(min(n, most) for n in seen) / (len(seen) * most)

    def row(self) -> dict[str, float]:
        """The fields of a step event."""
        return {"budget": self.share, "attention_share": self.share_now(), "price": self.price.weight}

    def state(self) -> dict[str, float]:
        return {"price": self.price.weight}

    def load(self, state: dict[str, float]) -> None:
        self._set_price(finite_number("budget.price", state["price"]))


def make_budget(model: TransformerStack, mean: Mean) -> SpanBudget | None:
    """None: the model has no budget."""
    share = model.config.attention.budget
    return SpanBudget(model, share, mean) if share else None


def head_parts(model: TransformerStack) -> list[Attention]:
    """The mechanisms of groups of heads, of every block; sinks around one are taken off."""
    found = []
    for mechanism in dict.fromkeys(model.mechanisms()):
        for part in mechanism.each() if isinstance(mechanism, Parts) else [mechanism]:
            found.append(part.inner if isinstance(part, Sinks) else part)
    return found


def learned_parts(model: TransformerStack, share: float) -> list[Spans]:
    """What learns spans; raises for a model whose cost they do not determine."""
    where, parts = f"model.attention.budget is {share:g}", head_parts(model)
    if model.config.kind != "lm":
        raise ValueError(
            f"{where} and model.kind is {model.config.kind!r}; expected 'lm', whose cost grows with max_span"
        )
    for part in parts:
        if not isinstance(part, Spans) and any(isinstance(m, Spans) for m in part.modules()):
            raise ValueError(
                f"{where}, and {type(part).__name__} costs more than its span; expected spans of kind adaptive_span or "
                "dynamic_span, or budget 0"
            )
    found = [part for part in parts if isinstance(part, Spans)]
    if not found:
        raise ValueError(
            f"{where}, and no head learns a span; expected adaptive_span or dynamic_span in model.attention.kind, or "
            "budget 0"
        )
    return found
