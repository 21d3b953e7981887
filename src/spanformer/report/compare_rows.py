"""The rows of compare.json: one for each run of a comparison, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spanformer.report.compare_table import best_by
from spanformer.report.equal import at_equal
from spanformer.report.events import Run
from spanformer.report.measures import counted_per_token, exact, mean_depth, peak_bytes, quality, seconds_per_step


@dataclass(frozen=True)
class CompareRow:
    """None: not known. Times are in seconds, bits are per unit."""

    run: str
    unit: str
    """byte, character, word, masked byte, …"""
    parameters: int
    steps: int
    tokens: int
    """training tokens"""
    bits: float | None
    """of the last validation"""
    equal_tokens: float | None
    """training tokens that all runs of the comparison reached"""
    bits_at_equal_tokens: float | None
    equal_seconds: float | None
    """training time of the run that trained for the shortest"""
    bits_at_equal_seconds: float | None
    exact: float | None
    """share predicted exactly, where such a share is measured"""
    seconds: float | None
    """training time"""
    seconds_per_step: float | None
    flops_per_token: float | None
    """counted in a training step"""
    peak_bytes: float | None
    """peak memory of a training step"""
    layers: float | None
    """mean layers of a token, if tokens differ"""
    best_by: tuple[str, ...]
    """costs for which no other run is both better and cheaper"""


def compare_rows(runs: Sequence[Run], names: Sequence[str]) -> list[CompareRow]:
    best, equal, found = best_by(runs, names), at_equal(runs), []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        curve, last, right = quality(run), run.steps[-1] if run.steps else None, exact(run)
        row = CompareRow(
            run=name, unit=run.start.bits_unit, parameters=run.start.parameters, steps=last.step if last else 0,
            tokens=last.tokens if last else 0, bits=_known(curve.bits[-1] if len(curve.bits) else None),
            equal_tokens=_known(equal.tokens), bits_at_equal_tokens=_known(equal.at_tokens[at]),
            equal_seconds=_known(equal.seconds), bits_at_equal_seconds=_known(equal.at_seconds[at]),
            exact=_known(right[1] if right else None), seconds=_known(last.seconds if last else None),
            seconds_per_step=_known(seconds_per_step(run)), flops_per_token=_known(counted_per_token(run)),
            peak_bytes=_known(peak_bytes(run)), layers=_known(mean_depth(run)), best_by=tuple(best.get(name, ())),
        )  # fmt: skip
        found.append(row)
    return found


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
