"""Bits of several runs at equal tokens and at equal training time, read from their curves.

tokens = min over runs of the training tokens at the last evaluation, seconds = min over runs of its training time

Between two evaluations bits are interpolated linearly. Bits fall ever more slowly, so the line lies above the curve: a
run that is read between evaluations looks a little worse than it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanformer.report.events import Run
from spanformer.report.measures import quality

SAME = 0.02
"""relative difference of times or tokens that counts as none"""


@dataclass(frozen=True)
class Equal:
    """What every run reached, and the bits of each run there. All are NaN if a run has no bits, or the units differ."""

    tokens: float
    """training tokens"""
    seconds: float
    """training time"""
    at_tokens: list[float]
    """[runs] bits"""
    at_seconds: list[float]
    """[runs] bits"""
    tokens_differ: bool
    """whether some run read more tokens"""
    seconds_differ: bool
    """whether some run trained longer"""


def at_equal(runs: Sequence[Run]) -> Equal:
    curves = [quality(run) for run in runs]
    if not all(len(curve.bits) for curve in curves) or len({run.start.bits_unit for run in runs}) != 1:
        unknown = [math.nan] * len(runs)
        return Equal(math.nan, math.nan, unknown, unknown, False, False)
    tokens = [tokens_at(run, curve.steps) for run, curve in zip(runs, curves, strict=True)]
    seconds = [curve.seconds for curve in curves]
    found = []
    for reached in (tokens, seconds):
        ends = [float(each[-1]) for each in reached]
        bits = [float(np.interp(min(ends), x, curve.bits)) for x, curve in zip(reached, curves, strict=True)]
        found.append((min(ends), bits, max(ends) > (1 + SAME) * min(ends)))
    (least, at_tokens, more), (shortest, at_seconds, longer) = found
    return Equal(least, shortest, at_tokens, at_seconds, more, longer)


def tokens_at(run: Run, steps: np.ndarray) -> np.ndarray:
    """Training tokens at these steps."""
    return np.interp(steps, [0, *(row.step for row in run.steps)], [0, *(row.tokens for row in run.steps)])
