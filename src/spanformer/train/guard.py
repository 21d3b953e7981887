"""Skips and counts harmful steps: losses or gradients that are not finite, and sudden loss spikes."""

from __future__ import annotations

import math
from typing import Any

from spanformer.core.checks import finite_number, whole_number

MEMORY = 0.98  # decay of the running average: about the last 50 steps
SETTLED = 50  # steps before spikes are detected; until then losses fall too fast to compare


class TooManySkips(Exception):
    """The run cannot continue; the message gives the reason."""


class Guard:
    def __init__(self, spike: float, max_skips: int) -> None:
        self.spike, self.max_skips = spike, max_skips
        self.average, self.steps, self.skips = 0.0, 0, 0

    def refuses(self, loss: float, grad_norm: float) -> str | None:
        """The reason to skip this step, or None."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient's norm is {grad_norm}"
        usual = self.average / (1 - MEMORY**self.steps) if self.steps else math.inf
        if self.spike and self.steps >= SETTLED and loss > self.spike * usual:
            return f"the loss is {loss:.3f}, {loss / usual:.1f} times its recent average"
        self.average = MEMORY * self.average + (1 - MEMORY) * loss
        self.steps += 1
        return None

    def count(self, reason: str) -> None:
        """Count a skipped step; raises TooManySkips above the limit."""
        self.skips += 1
        if self.skips >= self.max_skips:
            raise TooManySkips(
                f"{self.skips} steps were skipped, the last because {reason}; lower optim.lr, lengthen "
                "optim.warmup, or raise train.max_skips or train.spike"
            )

    def state(self) -> dict[str, float]:
        return {"average": self.average, "steps": self.steps, "skips": self.skips}

    def load(self, state: dict[str, Any]) -> None:
        self.average = finite_number("guard.average", state.get("average"))
        self.steps = whole_number("guard.steps", state.get("steps"))
        self.skips = whole_number("guard.skips", state.get("skips"))
