"""Heads of several kinds in one layer: for instance six fixed windows and two heads that learn their span."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View
from spanformer.ops import Rule

NO_EDGE = float(1 << 24)  # the span of a head that has none: beyond any sequence, and exact in float32


class Mixed(Attention):
    """The heads of each part, one part after the other."""

    def __init__(self, parts: Sequence[Attention]) -> None:
        super().__init__()
        for part in parts:
            if part.alone:
                raise ValueError(
                    f"{type(part).__name__} mixes in its own way here ({part.extra_repr()}), so its heads cannot share "
                    "a layer with other kinds; give it all heads of a layer"
                )
        self.parts = nn.ModuleList(parts)
        self.heads = sum(part.heads for part in parts)

    def rule(self, view: View) -> Rule:
        return join([part.rule(view) for part in self._parts()])

    def lookback(self) -> list[int]:
        return [n for part in self._parts() for n in part.lookback()]

    def learned(self) -> list[float | None]:
        return [z for part in self._parts() for z in part.learned()]

    def after_step(self) -> None:
        for part in self._parts():
            part.after_step()

    def _parts(self) -> list[Attention]:
        return [part for part in self.parts if isinstance(part, Attention)]


def join(rules: Sequence[Rule]) -> Rule:
    """One rule for the heads of all. Rules here carry reaches, spans and penalties, as fixed and learned windows do."""
    first = rules[0]
    ramps = {rule.ramp for rule in rules if rule.span is not None}
    if len(ramps) > 1:
        raise ValueError(f"the heads of one layer have ramps {sorted(ramps)}; expected one")
    penalties = [rule.penalty for rule in rules if rule.penalty is not None]
    return Rule(
        sum(rule.heads for rule in rules),
        causal=first.causal,
        reach=[r for rule in rules for r in rule.reach_list()],
        span=_join_spans(rules),
        ramp=ramps.pop() if ramps else first.ramp,
        penalty=sum(penalties[1:], penalties[0]) if penalties else None,
        original=first.original,
    )


def _join_spans(rules: Sequence[Rule]) -> Tensor | None:
    """[H], or [B, H, Tq] if any part is dynamic; heads without a span get one beyond every distance."""
    given = [rule.span for rule in rules if rule.span is not None]
    if not given:
        return None
    largest = max(given, key=lambda t: t.ndim)
    spans = []
    for rule in rules:
        span = largest.new_full((rule.heads,), NO_EDGE) if rule.span is None else rule.span
        if span.ndim < largest.ndim:
            span = span[None, :, None].expand(largest.shape[0], -1, largest.shape[2])
        spans.append(span)
    return torch.cat(spans, 1 if largest.ndim == 3 else 0)
