"""How far a run has come: all that is counted and averaged, in a form a checkpoint can hold."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from spanformer.core.checks import finite_number, whole_number
from spanformer.model.fields import build
from spanformer.train.config import RunConfig
from spanformer.train.optim import lr_at


@dataclass
class Progress:
    step: int = 0
    seconds: float = 0.0
    """of training steps, over all times the run was continued; evaluations and checkpoints are not in it"""
    tokens: int = 0
    latest: float | None = None
    """validation bits per unit; None if they were not finite"""
    best: float | None = None
    stale: int = 0
    """evaluations since the best"""
    scored_at: int = -1
    """the step of the latest evaluation"""
    loss_sum: float = 0.0
    penalty_sum: float = 0.0
    count: int = 0
    """steps since the last row of events"""
    logged_seconds: float = 0.0
    logged_tokens: int = 0

    @property
    def mean_loss(self) -> float:
        """Nats per token since the last row."""
        return self.loss_sum / self.count if self.count else float("nan")

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

    def row(self) -> dict:
        """What a row of events says about the steps since the row before."""
        elapsed = self.seconds - self.logged_seconds
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "loss": self.mean_loss,
            "penalty": self.penalty_sum / self.count if self.count else float("nan"),
            "tokens_per_second": (self.tokens - self.logged_tokens) / elapsed if elapsed else float("nan"),
        }

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
    """What the learning rate is multiplied with when `step` steps have been taken, and `seconds` have gone until the
    end of the next one. With a time budget the schedule ends when it is used up, by the steps that the pace until now
    lets expect."""
    budget = config.train.minutes * 60
    total = config.train.steps
    if budget and seconds > 0:
        total = min(total, max(step + 1, round((step + 1) * budget / seconds)))
    return lr_at(config.optim, step, total)
