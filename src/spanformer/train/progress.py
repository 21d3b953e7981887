"""Progress of a run: its counters and running averages, in a form that a checkpoint can save."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from spanformer.core.checks import finite_number, whole_number
from spanformer.core.fields import build
from spanformer.train.config import RunConfig
from spanformer.train.optim import lr_at


@dataclass
class Progress:
    step: int = 0
    seconds: float = 0.0
    """of training steps, summed over resumes, without evaluations and checkpoints"""
    tokens: int = 0
    latest: float | None = None
    """validation bits per unit; None if not finite"""
    best: float | None = None
    stale: int = 0
    """evaluations since the best"""
    scored_at: int = -1
    """the step of the latest evaluation"""
    loss_sum: float = 0.0
    penalty_sum: float = 0.0
    count: int = 0
    """steps since the last logged row"""
    logged_seconds: float = 0.0
    logged_tokens: int = 0

    @property
    def mean_loss(self) -> float:
        """Nats per token since the last row."""
        return self.loss_sum / self.count if self.count else float("nan")

    @property
    def mean_penalty(self) -> float:
        """Since the last row."""
        return self.penalty_sum / self.count if self.count else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Since the last row."""
        elapsed = self.seconds - self.logged_seconds
        return (self.tokens - self.logged_tokens) / elapsed if elapsed else float("nan")

    def add(self, loss: float, penalty: float) -> None:
        self.loss_sum += loss
        self.penalty_sum += penalty
        self.count += 1

    def take_score(self, bits: float) -> None:
        self.scored_at = self.step
        self.latest = bits if math.isfinite(bits) else None
        if self.latest is not None and (self.best is None or self.latest < self.best):
            self.best, self.stale = self.latest, 0
        else:
            self.stale += 1

    def clear(self) -> None:
        self.loss_sum, self.penalty_sum, self.count = 0.0, 0.0, 0
        self.logged_seconds, self.logged_tokens = self.seconds, self.tokens

    def state(self) -> dict:
        return asdict(self)

    def load(self, state: dict) -> None:
        read = build(Progress, state)
        for field in fields(read):
            value, name = getattr(read, field.name), f"progress.{field.name}"
            if isinstance(value, int):
                whole_number(name, value, -1 if field.name == "scored_at" else 0)
            elif value is not None:
                finite_number(name, value)
            setattr(self, field.name, value)


def schedule_factor(config: RunConfig, step: int, seconds: float) -> float:
    """The factor on the learning rate after `step` steps, with `seconds` elapsed at the end of the next one. With a
    time budget the schedule ends with it: the total number of steps is estimated from the pace so far."""
    budget = config.train.minutes * 60
    total = config.train.steps
    if budget and seconds > 0:
        total = min(total, max(step + 1, round((step + 1) * budget / seconds)))
    return lr_at(config.optim, step, total)
