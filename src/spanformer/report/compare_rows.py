"""The rows of compare.json: one for each run of a comparison, as plain numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spanformer.core.fields import build
from spanformer.core.paths import check_regular
from spanformer.report.compare_table import best_by
from spanformer.report.equal import at_equal
from spanformer.report.events import Run
from spanformer.report.measures import (
    TIME_PARTS,
    counted_attention_share,
    counted_per_token,
    evals,
    exact,
    looks_back,
    mean_depth,
    peak_bytes,
    predicted_attention_share,
    quality,
    seconds_per_step,
    share,
    step_times,
)

FILE = "compare.json"


@dataclass(frozen=True)
class CompareRow:
    """None: not known. Times are in seconds, bits are per unit."""

    run: str
    attention: str
    """kind of attention, or with semicolons the kinds of layers"""
    seed: int
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
    test_bits: float | None
    """of the test split, by the best checkpoint"""
    test_tokens: int
    """tokens of that split that were read"""
    exact: float | None
    """share predicted exactly, where such a share is measured"""
    seconds: float | None
    """training time"""
    seconds_per_step: float | None
    attention_seconds: float | None
    """of a step; with products, optimizer and rest they are all of it"""
    products_seconds: float | None
    """matrix products outside attention"""
    optimizer_seconds: float | None
    rest_seconds: float | None
    saving: float | None
    """share of the possible saving that is realised: (t_full − t) / time in attention of the run with full attention"""
    flops_per_token: float | None
    """counted in a training step"""
    attention_share: float | None
    """operations of attention, as counted, relative to those of full attention"""
    predicted_attention_share: float | None
    """the same by arithmetic, from the heads' reaches; a pattern may need far fewer"""
    peak_bytes: float | None
    """peak memory of a training step"""
    span_average: float | None
    """mean over all heads; tokens that a head sees if it learns no span"""
    span_longest: float | None
    layers: float | None
    """mean layers of a token, if tokens differ"""
    best_by: tuple[str, ...]
    """costs for which no other run is both better and cheaper"""


def compare_rows(runs: Sequence[Run], names: Sequence[str]) -> list[CompareRow]:
    best, equal, found = best_by(runs, names), at_equal(runs), []
    whole = full_run(runs)
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        curve, last, right = quality(run), run.steps[-1] if run.steps else None, exact(run)
        test, spans = next(reversed(evals(run, "test")), None), None if last is None else looks_back(last)
        times = step_times(run)
        parts = {} if times is None else times["learned"]
        row = CompareRow(
            run=name, attention=attention_of(run), seed=seed_of(run), unit=run.start.bits_unit,
            parameters=run.start.parameters, steps=last.step if last else 0, tokens=last.tokens if last else 0,
            bits=_known(curve.bits[-1] if len(curve.bits) else None),
            equal_tokens=_known(equal.tokens), bits_at_equal_tokens=_known(equal.at_tokens[at]),
            equal_seconds=_known(equal.seconds), bits_at_equal_seconds=_known(equal.at_seconds[at]),
            test_bits=_known(test.bits if test else None), test_tokens=test.tokens if test else 0,
            exact=_known(right[1] if right else None), seconds=_known(last.seconds if last else None),
            seconds_per_step=_known(seconds_per_step(run)),
            **{f"{part}_seconds": _known(parts.get(part)) for part in TIME_PARTS},
            saving=_known(None if whole is None else saving(run, whole)),
            flops_per_token=_known(counted_per_token(run)),
            attention_share=_known(counted_attention_share(run)),
            predicted_attention_share=_known(predicted_attention_share(run)), peak_bytes=_known(peak_bytes(run)),
            span_average=_known(None if spans is None else spans.mean()),
            span_longest=_known(None if spans is None else spans.max()),
            layers=_known(mean_depth(run)), best_by=tuple(best.get(name, ())),
        )  # fmt: skip
        found.append(row)
    return found


def full_run(runs: Sequence[Run]) -> Run | None:
    """The run with full attention in every layer; None if there is none, or more than one."""
    found = [run for run in runs if set(attention_of(run).split("; ")) == {"full"}]
    return found[0] if len(found) == 1 else None


def saving(run: Run, whole: Run) -> float:
    """By how much a step is shorter than that of full attention, as a share of the time which that spends in attention.
    NaN for that run itself, and when times were not measured."""
    times, full_times = step_times(run), step_times(whole)
    if run is whole or times is None or full_times is None:
        return math.nan
    t, t_full = (sum(each["learned"].values()) for each in (times, full_times))
    return share(t_full - t, full_times["learned"]["attention"])


def attention_of(run: Run) -> str:
    """The run file's kind of attention, or the kinds of its layers."""
    attention = _section(_section(run.start.config, "model"), "attention")
    stack, kind = attention.get("stack"), attention.get("kind")
    if isinstance(stack, list) and stack:
        return "; ".join(map(str, stack))
    return kind if isinstance(kind, str) else "attention"


def seed_of(run: Run) -> int:
    """0: not recorded."""
    seed = _section(run.start.config, "train").get("seed")
    return seed if isinstance(seed, int) else 0


def _section(config: dict, name: str) -> dict:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def read_rows(path: Path) -> list[CompareRow]:
    """The rows of a compare.json, or of the one in a comparison's folder."""
    file = path / FILE if path.is_dir() else path
    if not file.exists():
        raise ValueError(
            f"{file} does not exist; expected the folder of a comparison (spanformer compare … --out {path})"
        )
    check_regular(file, "the file of a comparison")
    try:
        rows = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        rows = None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{file} is not a list of runs in JSON; expected the {FILE} of a comparison")
    try:
        return [build(CompareRow, row, str(file)) for row in rows]
    except ValueError as error:
        raise ValueError(f"{error}; repeat the command of the comparison, which writes {FILE} again") from None


def _known(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
