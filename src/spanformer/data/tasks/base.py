"""A task: texts of one length that end with questions, of which only the answers count.

Shapes: N texts, T tokens of a text. Tokens are bytes below 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Task:
    """A subclass has a parameter for each field, and checks them in __post_init__."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """part of the names of its files: raise it when its texts change"""

    @property
    def length(self) -> int:
        """T"""
        raise NotImplementedError

    def answers(self) -> np.ndarray:
        """[T] bool: which tokens are answers, the same for all texts."""
        raise NotImplementedError

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """[count, T] uint8: random texts."""
        raise NotImplementedError

    @property
    def counted(self) -> np.ndarray:
        """[T − 1] bool: where the next token is an answer."""
        return self.answers()[1:]

    def require(self, ok: bool, name: str, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name} of the task {self.name} is {getattr(self, name)}; expected {expected}")


@dataclass(frozen=True)
class DistanceTask(Task):
    """A task whose questions are `distance` tokens after what they ask for. With `nearest`, each text has a distance of
    its own, drawn between the two on a logarithmic scale; shorter ones begin with filler, so that all texts are equally
    long."""

    distance: int = 64
    nearest: int = 0

    def check_distances(self, least: int) -> None:
        self.require(least <= self.distance <= 1 << 16, "distance", f"{least} … {1 << 16:,} tokens")
        wanted = f"0, for `distance` in all texts, or {least} … {self.distance} tokens"
        self.require(self.nearest == 0 or least <= self.nearest <= self.distance, "nearest", wanted)

    def distances(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """[count] the distance of each text."""
        nearest = self.nearest or self.distance
        return on_log_scale(draw, nearest, self.distance, count)


def on_log_scale(draw: np.random.Generator, low: int, high: int, shape: int | tuple[int, ...]) -> np.ndarray:
    """Numbers low … high of this shape, small ones more often: a model learns large ones once it knows small ones."""
    return np.clip(np.exp(draw.uniform(np.log(low), np.log(high + 1), shape)).astype(np.int64), low, high)


def without_repeats(draw: np.random.Generator, count: int, symbols: int, taken: int) -> np.ndarray:
    """[count, taken] different numbers below `symbols` in every row, in random order."""
    return draw.random((count, symbols)).argsort(1)[:, :taken]


def put(texts: np.ndarray, at: np.ndarray, tokens: np.ndarray) -> None:
    """Write tokens [N, n] into texts [N, T] from the places at [N] on."""
    np.put_along_axis(texts, at[:, None] + np.arange(tokens.shape[1]), tokens.astype(texts.dtype), 1)
