"""Advice about a run's settings from its learned spans: spans that do not move, reach max_span or collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from spanformer.core.checks import finite_number
from spanformer.train.config import RunConfig

PATIENCE = 300  # steps after the warm-up before unmoved spans are reported
STILL = 1.0  # tokens
AT_LIMIT = 0.98  # of max_span
MISSED = 0.05  # share of the budget
CROWD = 0.25  # share of the heads


class Diagnosis:
    """Gives each piece of advice once per run, also across resumes."""

    def __init__(self, config: RunConfig, started_at: Sequence[float]) -> None:
        self.config, self.started_at = config, list(started_at)
        self.longest_ever = max(started_at, default=0.0)
        self.said: set[str] = set()

    def check(self, step: int, spans: Sequence[float], share: float = math.nan) -> list[str]:
        """Advice about the learned spans (tokens, all heads of all layers) after this step. share: of full attention's
        cost, in a run with a budget."""
        if not spans:
            return []
        if len(self.started_at) != len(spans):  # dynamic spans exist only after the first forward pass
            self.started_at = list(spans)
        a, o = self.config.model.attention, self.config.optim
        settled = step >= o.warmup + PATIENCE
        moved = max(abs(now - then) for now, then in zip(spans, self.started_at, strict=True))
        most = self.config.model.max_span
        at_limit = sum(z >= AT_LIMIT * most for z in spans)
        collapsed = max(spans) < STILL and self.longest_ever > 2 * a.ramp
        self.longest_ever = max(self.longest_ever, *spans)
        penalty = "" if a.budget else f"model.attention.penalty (now {a.penalty:g})"  # a budget finds its own price
        found = []
        if settled and moved < STILL:
            found.append(("still", (
                f"no span has moved by a token in {step:,} steps: raise optim.span_lr (now {o.span_lr or o.lr:g}) or "
                f"model.attention.ramp (now {a.ramp:g}; only distances on the ramp give a span gradients)"
                + (f", or lower {penalty}" if penalty and a.penalty else "")
            )))  # fmt: skip
        if settled and at_limit >= CROWD * len(spans) and a.init < AT_LIMIT:
            found.append(("limit", (
                f"{at_limit} of {len(spans)} heads have reached max_span, {most:,} tokens: raise "
                "model.attention.max_span if longer context helps"
                + (f", or {penalty} if it costs too much" if penalty else "")
            )))  # fmt: skip
        if settled and abs(share - a.budget) > MISSED * a.budget:
            found.append(("budget", (
                f"attention computes {share:.4g} of full attention's distances, and model.attention.budget is "
                f"{a.budget:g}: dynamic spans follow it on average only; lower optim.span_lr (now "
                f"{o.span_lr or o.lr:g})"
            )))  # fmt: skip
        if collapsed and penalty:
            found.append(("collapse", (
                f"every span has collapsed to less than a token (the longest was {self.longest_ever:,.0f}): lower "
                f"{penalty} or optim.span_lr (now {o.span_lr or o.lr:g})"
            )))  # fmt: skip
        new = [text for kind, text in found if kind not in self.said]
        self.said |= {kind for kind, _ in found}
        return new

    def advice(self, found: Mapping[str, str]) -> list[str]:
        """What mechanisms say of their layers, once for each layer."""
        new = [f"{layer}: {text}" for layer, text in found.items() if layer not in self.said]
        self.said |= set(found)
        return new

    def state(self) -> dict:
        return {"started_at": self.started_at, "longest_ever": self.longest_ever, "said": sorted(self.said)}

    def load(self, state: dict) -> None:
        self.started_at = [finite_number("diagnosis.started_at", span) for span in state["started_at"]]
        self.longest_ever = finite_number("diagnosis.longest_ever", state["longest_ever"])
        self.said = set(map(str, state["said"]))
