"""Patterns that depend only on the distance i − j: windows, dilated and strided ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spanformer.attention.pattern.base import Either, Pattern, at_least, every_row
from spanformer.ops.rule import UNLIMITED


@dataclass(frozen=True)
class Full(Pattern):
    """Every pair."""

    def sees(self, i, j, where):
        return i == i

    def areas(self, lo, hi, where):
        return [(every_row(lo), torch.full_like(lo, where.start), torch.full_like(lo, where.stop))]

    def bands(self, causal):
        return [(1, 0, UNLIMITED)]


@dataclass(frozen=True)
class Window(Pattern):
    """Window(w): |i − j| < w, itself and w − 1 tokens on each side. Window(b, a): −a ≤ i − j ≤ b, that is, b before and
    a after."""

    width: int
    after: int | None = None

    def __post_init__(self) -> None:
        at_least("width", self.width, 1 if self.after is None else 0)
        if self.after is not None:
            at_least("after", self.after, 0)

    def _sides(self) -> tuple[int, int]:
        return (self.width - 1, self.width - 1) if self.after is None else (self.width, self.after)

    def sees(self, i, j, where):
        before, after = self._sides()
        return (i - j <= before) & (j - i <= after)

    def areas(self, lo, hi, where):
        before, after = self._sides()
        return [(every_row(lo), lo - before, hi + after)]

    def bands(self, causal):
        before, after = self._sides()
        return [(1, 0, before + 1)] if causal or before == after else None

    def context_length(self):
        return self._sides()[0]

    def lookahead(self):
        return self._sides()[1]


@dataclass(frozen=True)
class Dilated(Pattern):
    """|i − j| = 0, step, …, (w − 1)·step."""

    width: int
    step: int

    def __post_init__(self) -> None:
        at_least("width", self.width, 1)
        at_least("step", self.step, 1)

    def sees(self, i, j, where):
        return ((i - j).abs() <= (self.width - 1) * self.step) & ((i - j) % self.step == 0)

    def areas(self, lo, hi, where):
        far = (self.width - 1) * self.step
        return [(every_row(lo), lo - far, hi + far)]

    def bands(self, causal):
        return [(self.step, 0, (self.width - 1) * self.step + 1)]

    def context_length(self):
        return (self.width - 1) * self.step

    def lookahead(self):
        return self.context_length()


@dataclass(frozen=True)
class Every(Pattern):
    """i − j ≡ 0 mod step: the second half of the Sparse Transformer's strided attention."""

    step: int

    def __post_init__(self) -> None:
        at_least("step", self.step, 1)

    def sees(self, i, j, where):
        return (i - j) % self.step == 0

    def areas(self, lo, hi, where):
        return Full().areas(lo, hi, where)

    def bands(self, causal):
        return [(self.step, 0, UNLIMITED)]


@dataclass(frozen=True)
class Strided(Pattern):
    """|i − j| ≤ l, or i − j ≡ 0 mod l (Sparse Transformer)."""

    step: int

    def __post_init__(self) -> None:
        at_least("step", self.step, 1)

    def factors(self) -> tuple[Pattern, Pattern]:
        return Window(self.step + 1), Every(self.step)

    def sees(self, i, j, where):
        return Either(self.factors()).sees(i, j, where)

    def areas(self, lo, hi, where):
        return Full().areas(lo, hi, where)

    def bands(self, causal):
        return Either(self.factors()).bands(causal)
