"""Measures of a run from its rows, as numbers and in words: bits per unit, spans, predicted cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from spanformer.core.events import ASKED, EvalEvent, StepEvent
from spanformer.cost.model import StepCost, full, step_cost
from spanformer.report.attention import duration
from spanformer.report.events import Run

NOTHING = "–"


@dataclass(frozen=True)
class Curve:
    """Bits per unit as training went on."""

    steps: np.ndarray
    seconds: np.ndarray
    bits: np.ndarray


def bits_per_unit(run: Run, loss: float | np.ndarray) -> float | np.ndarray:
    """Nats per token of the training text as bits per byte, character or word of it; for masked tokens, as
    bits of each of them."""
    if run.start.objective in ASKED:
        return loss / math.log(2)
    tokens, units = run.start.tokens.get("train", 0), run.start.units.get("train", 0)
    return loss / math.log(2) * (tokens / units if tokens and units else 1.0)


def training(run: Run) -> Curve:
    rows = [row for row in run.steps if _usable(row.loss)]
    return _curve(rows, [bits_per_unit(run, row.loss) for row in rows])


def evaluated(run: Run, split: str) -> Curve:
    rows = evals(run, split)
    return _curve(rows, [row.bits for row in rows])


def evals(run: Run, split: str) -> list[EvalEvent]:
    return [row for row in run.evals if row.split == split and _usable(row.bits)]


def _usable(loss: float) -> bool:
    """Whether a loss can be drawn on a logarithmic axis: training that diverged logs other values."""
    return 0 < loss < 1e9


def _curve(rows: list, bits: list) -> Curve:
    columns = ([row.step for row in rows], [row.seconds for row in rows], bits)
    return Curve(*(np.array(column, dtype=np.float64) for column in columns))


def smooth(values: np.ndarray) -> tuple[np.ndarray, int]:
    """A running mean and its window in rows; near the ends the window is smaller."""
    half = len(values) // 60
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    side = np.minimum(half, np.minimum(at, len(values) - 1 - at))
    return (sums[at + side + 1] - sums[at - side]) / (2 * side + 1), 2 * half + 1


def quality(run: Run) -> Curve:
    """Validation bits, or the smoothed training bits of a run that was never validated."""
    valid = evaluated(run, "valid")
    if len(valid.bits):
        return valid
    train = training(run)
    return Curve(train.steps, train.seconds, smooth(train.bits)[0])


def looks_back(row: StepEvent) -> np.ndarray:
    """[layers, heads] a head's span in tokens; its reach if it learns none."""
    return np.where(np.isnan(row.spans), row.reach, row.spans)


def predicted(run: Run, row: StepEvent | None = None) -> tuple[StepCost, StepCost] | None:
    """The predicted cost of a step with the spans of this row (default: the last), and with full attention, memories
    filled. For language models only."""
    if not run.steps or run.start.objective != "lm":
        return None
    row = row or run.steps[-1]
    shape = run.start.shape
    return step_cost(shape, row.reach.tolist()), step_cost(shape, full(shape))


def share(learned: float, whole: float) -> float:
    """How much of full attention's cost is left; NaN when full attention costs nothing."""
    return learned / whole if whole else math.nan


EXACT = {"seq2seq": "exact match", "encoder": "masked tokens right", "task": "answers right"}


def exact(run: Run) -> tuple[str, float] | None:
    """What `EvalEvent.exact` is called in this run, and its last value on the validation split."""
    found = [row.exact for row in run.evals if row.split == "valid" and math.isfinite(row.exact)]
    return (EXACT.get(run.start.objective, "exactly right"), found[-1]) if found else None


def mean_depth(run: Run) -> float:
    """The mean layers of a token in the last evaluation, else in training; NaN if every token runs through all."""
    found = [row.depth for row in (*run.steps, *(row for row in run.evals if row.split == "valid"))]
    return next((depth for depth in reversed(found) if math.isfinite(depth)), math.nan)


def pace(run: Run) -> float:
    """Seconds a step took in training on average, so that they multiply to its time; NaN when unknown."""
    if len(run.steps) < 2:
        return run.steps[0].seconds / run.steps[0].step if run.steps and run.steps[0].step else math.nan
    first, last = run.steps[0], run.steps[-1]  # the time before the first row may include more than steps
    return (last.seconds - first.seconds) / (last.step - first.step)


TIMED = ("step", "attention", "products", "optimizer")
"""what was timed: a whole step, and disjoint parts of it"""
TIME_PARTS = {"attention": "attention", "products": "other products", "optimizer": "optimiser", "rest": "the rest"}
"""the parts' names in a report"""


def time_parts(seconds: Mapping[str, float]) -> dict[str, float]:
    """Where the time of a step goes: seconds by the keys of TIME_PARTS, from those of TIMED."""
    parts = {name: seconds[name] for name in TIMED[1:]}
    return parts | {"rest": max(0.0, seconds["step"] - sum(parts.values()))}


def step_times(run: Run) -> dict[str, dict[str, float]] | None:
    """Where a step's time goes with the "learned" spans and with "full" attention, as last measured."""
    rows = [row for row in run.costs if row.step_seconds and row.attention_seconds and row.products_seconds]
    if not rows:
        return None
    timed = {name: getattr(rows[-1], f"{name}_seconds") for name in TIMED}
    return {which: time_parts({name: both[which] for name, both in timed.items()}) for which in ("learned", "full")}


def said_parts(parts: Mapping[str, float]) -> str:
    """Where a step's time goes, in words."""
    whole = sum(parts.values())
    return ", ".join(f"{TIME_PARTS[part]} {percent(share(seconds, whole))}" for part, seconds in parts.items())


def seconds_per_step(run: Run) -> float:
    """Measured on one batch, or else the median between the rows of the last half; NaN when unknown."""
    measured = [row.step_seconds["learned"] for row in run.costs if row.step_seconds]
    if measured:
        return measured[-1]
    late = run.steps[len(run.steps) // 2 :]
    steps, seconds = np.diff([row.step for row in late]), np.diff([row.seconds for row in late])
    return float(np.median(seconds[steps > 0] / steps[steps > 0])) if (steps > 0).any() else math.nan


def attention_per_token(run: Run) -> float:
    """Predicted operations per token that depend on spans; NaN for a run without steps."""
    costs = predicted(run)
    return costs[0].by_span / run.start.shape.tokens if costs else math.nan


def counted_per_token(run: Run) -> float:
    """Operations of a training step that were counted, for each of its tokens (of pairs, those of the targets); NaN
    when they were not."""
    counted = [row.flops["learned"] / (row.tokens or run.start.shape.tokens) for row in run.costs if row.flops]
    return counted[-1] if counted else math.nan


def counted_share(run: Run) -> float:
    """How much of a step's operations with full attention are left, as counted; NaN when they were not."""
    counted = [share(row.flops["learned"], row.flops["full"]) for row in run.costs if row.flops]
    return counted[-1] if counted else math.nan


def predicted_attention_share(run: Run) -> float:
    """How much of full attention's operations is left by arithmetic, from the heads' reaches; NaN when unknown. A
    pattern reaches far with few pairs, and is counted as if it saw all of them."""
    costs = predicted(run)
    return share(costs[0].by_span, costs[1].by_span) if costs else math.nan


def counted_attention_share(run: Run) -> float:
    """How much of full attention's operations is left as counted, where whole blocks are computed; the products of a
    step that no span changes are taken off. NaN when they were not counted."""
    costs, counted = predicted(run), [row for row in run.costs if row.flops]
    if costs is None or not counted:
        return math.nan
    per_token = (costs[1].total - costs[1].by_span) / run.start.shape.tokens
    others = per_token * (counted[-1].tokens or run.start.shape.tokens)
    learned, whole = (counted[-1].flops[which] - others for which in ("learned", "full"))
    return share(learned, whole) if learned >= 0 and whole > 0 else math.nan


def peak_bytes(run: Run) -> float:
    """Peak memory of a training step above what was there before it, measured; NaN when it was not."""
    measured = [row.peak_bytes["learned"] for row in run.costs if row.peak_bytes]
    return measured[-1] if measured else math.nan


def amount(value: float) -> str:
    """A count, in a unit that reads well."""
    if not math.isfinite(value):
        return NOTHING
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if abs(value) >= size:
            return f"{_digits(value / (1e3 if unit == 'k' else size))} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else _digits(value)


def size(count: float) -> str:
    """Bytes, in a unit that reads well."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:,.0f} bytes"


def decimal(count: float) -> str:
    """Bytes in decimal units: 1 MB = 10⁶."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:,.0f} {unit}"
    return f"{count:,.0f} B"


def lasting(seconds: float) -> str:
    """A time, in a unit that reads well."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 120:
        return duration(1e3 * seconds) if seconds < 1 else f"{seconds:.3g} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def tokens(value: float) -> str:
    """A span or a reach, in tokens."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %" if math.isfinite(value) else NOTHING


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 99.5 else f"{value:.3g}"
