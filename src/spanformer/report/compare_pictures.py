"""Pictures of several runs together: quality side by side, quality against cost, and a sweep over the span limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spanformer.report.drawing import (
    Picture,
    bits_axis,
    colours,
    frame,
    grid,
    label_ends,
    log_ticks,
    plain,
    span_axis,
    subplots,
    time_unit,
    whole_steps,
)
from spanformer.report.equal import at_equal
from spanformer.report.events import Run
from spanformer.report.measures import amount, lasting, looks_back, quality, tokens
from spanformer.report.pareto import COUNTED, PREDICTED, Axis, known, pareto_picture
from spanformer.report.rows import LARGEST


def compare_pictures(runs: Sequence[Run], names: Sequence[str]) -> list[Picture]:
    """Every picture that these runs allow together; names: one for each run, all different."""
    named = {name: run for name, run in zip(names, runs, strict=True) if len(quality(run).bits)}
    if len(named) < 2 or len({run.start.bits_unit for run in named.values()}) > 1:
        return []
    pictures = (bits_picture(named), pareto_picture(named), sweep_picture(list(named.values())))
    return [picture for picture in pictures if picture is not None]


def bits_picture(named: dict[str, Run]) -> Picture:
    """Bits of every run against steps and against training time."""
    unit = next(iter(named.values())).start.bits_unit
    curves = {name: quality(run) for name, run in named.items()}
    second, seconds_name = time_unit(max(float(curve.seconds[-1]) for curve in curves.values()))
    figure, ((by_step, by_time),) = subplots(1, 2, width=13.0, height=max(4.6, 1.6 + 0.17 * len(named)), sharey=True)
    for axis, x_of in ((by_step, lambda curve: curve.steps), (by_time, lambda curve: curve.seconds / second)):
        for curve, colour in zip(curves.values(), colours(len(curves)), strict=True):
            x = x_of(curve)
            axis.plot(x, curve.bits, color=colour, linewidth=2.0, marker="o" if len(x) < 40 else None, markersize=3.5)
            axis.plot(x[-1:], curve.bits[-1:], color=colour, marker="o", markersize=6, clip_on=False)
        axis.set_xlim(right=max(float(x_of(curve)[-1]) for curve in curves.values()))
        grid(axis)
        axis.tick_params(labelleft=True)
    whole_steps(by_step)
    by_time.set_xlabel(f"training time ({seconds_name})")
    bits_axis(by_step, unit, np.concatenate([curve.bits for curve in curves.values()]))
    unseen = [name for name, run in named.items() if not any(row.split == "valid" for row in run.evals)]
    below = "Validation bits; the number is the last value."
    below += f" Smoothed training bits (no validation): {', '.join(plain(name) for name in unseen)}." * bool(unseen)
    frame(figure, f"Bits per {unit}, run by run", below, beside=2.2)
    ends = [
        (float(curve.bits[-1]), f"{plain(name, 26)} {curve.bits[-1]:.3f}", colour)
        for (name, curve), colour in zip(curves.items(), colours(len(curves)), strict=True)
    ]
    for axis in (by_step, by_time):
        label_ends(axis, [(axis.get_xlim()[1], *end) for end in ends])
    best = min(curves, key=lambda name: curves[name].bits[-1])
    worst = max(curves, key=lambda name: curves[name].bits[-1])
    sentence = f"{best} ends lowest, at {curves[best].bits[-1]:.3f} bits per {unit} after "
    sentence += f"{lasting(curves[best].seconds[-1])}; {worst} ends highest, at {curves[worst].bits[-1]:.3f} after "
    sentence += f"{lasting(curves[worst].seconds[-1])}."
    return Picture("compare-bits", "Quality, run by run", sentence, figure)


def sweep_picture(runs: list[Run]) -> Picture | None:
    """The paper's Figure 3: quality, average span and, where it is known, cost against the span limit, by kind of
    attention. Quality is the final one, or that at equal tokens if runs differ in them. The cost is predicted for
    attention; if it cannot be, it is the counted cost of the whole step."""
    runs = [run for run in runs if run.steps]
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        kinds.setdefault(kind_of(run), []).append(run)
    if len({limit_of(run) for some in kinds.values() for run in some}) < 2:
        return None
    unit = runs[0].start.bits_unit
    cost = next((axis for axis in (PREDICTED, COUNTED) if known(axis, runs)), None)
    equal = at_equal(runs)
    bits = {run.path: at for run, at in zip(runs, equal.at_tokens, strict=True)}
    when = f"after {amount(equal.tokens)} tokens" if equal.tokens_differ else "at the end"
    panels = {
        f"bits per {unit} {when} (lower is better)": lambda run: bits[run.path],
        "average span (tokens)": lambda run: float(looks_back(run.steps[-1]).mean()),
    }
    panels |= {} if cost is None else {cost[0]: cost[1]}
    figure, axes = subplots(1, len(panels), width=14.5 / 3 * len(panels), height=4.7)
    for axis, (label, value_of) in zip(axes[0], panels.items(), strict=True):
        axis.ends = []
        for (kind, some), colour in zip(kinds.items(), colours(len(kinds)), strict=True):
            x, y = _by_limit(some, value_of)
            axis.plot(x, y, color=colour, linewidth=2.2, marker="o", markersize=5)
            axis.ends.append((y[-1], plain(kind, 24), colour))
        axis.set_xscale("log", base=2)
        limits = sorted({limit_of(run) for some in kinds.values() for run in some})
        _limit_ticks(axis, limits)
        axis.set_xlabel("span limit (tokens)")
        axis.set_title(label, loc="left", fontsize=10)
        grid(axis)
    values = [[y for line in axis.lines for y in line.get_ydata()] for axis in axes[0]]
    span_axis(axes[0, 1], max(1.0, *values[1]))  # a span may be 0
    axes[0, 1].set_ylabel("")
    if cost is not None:
        axes[0, 2].set_yscale("log")
        log_ticks(axes[0, 2].yaxis, values[2], amount)
    below = "Where several runs share a limit and a kind, their mean."
    below += " Spans and costs are those at the end of each run." * equal.tokens_differ
    frame(figure, "What a larger span limit brings, and what it costs", below, beside=1.15)
    for axis in axes[0]:
        label_ends(axis, [(axis.get_xlim()[1], *end) for end in axis.ends])
    return Picture(
        "sweep", "Sweep over the span limit", _sweep_sentence(kinds, bits, f"bits per {unit} {when}", cost), figure
    )


def _sweep_sentence(kinds: dict[str, list[Run]], bits_of: dict[Path, float], bits_when: str, cost: Axis | None) -> str:
    said = []
    for kind, some in kinds.items():
        limits, bits = _by_limit(some, lambda run: bits_of[run.path])
        _, spans = _by_limit(some, lambda run: float(looks_back(run.steps[-1]).mean()))
        if len(limits) > 1:
            said.append(
                f"{kind}: from a limit of {limits[0]:,.0f} to {limits[-1]:,.0f} {bits_when} go from {bits[0]:.3f} "
                f"to {bits[-1]:.3f}, the average span from {tokens(spans[0])} to {tokens(spans[-1])} tokens"
            )
            if cost is not None:
                _, costs = _by_limit(some, cost[1])
                what = "attention" if cost == PREDICTED else "a step"
                said[-1] += f" and {what} costs {costs[-1] / costs[0]:.3g} times as much"
    return "; ".join(said) + "." if said else "Each kind of attention was trained with one limit only."


def limit_of(run: Run) -> int:
    limit = _attention_config(run).get("max_span")
    return limit if isinstance(limit, int) and 0 < limit < LARGEST else run.start.shape.max_span


def kind_of(run: Run) -> str:
    kind = _attention_config(run).get("kind")
    return kind if isinstance(kind, str) else "attention"


def _attention_config(run: Run) -> dict:
    model = run.start.config.get("model")
    attention = model.get("attention") if isinstance(model, dict) else None
    return attention if isinstance(attention, dict) else {}


def _by_limit(runs: list[Run], value_of) -> tuple[list[float], list[float]]:
    found: dict[int, list[float]] = {}
    for run in runs:
        found.setdefault(limit_of(run), []).append(value_of(run))
    return sorted(found), [float(np.mean(found[limit])) for limit in sorted(found)]


def _limit_ticks(axis, limits: list[int]) -> None:
    """Label each limit, except where labels would overlap."""
    kept = [limits[0]]
    for limit in limits[1:]:
        if limit >= 1.7 * kept[-1]:
            kept.append(limit)
    axis.set_xticks(kept, [f"{limit:,}" for limit in kept])
    axis.xaxis.minorticks_off()
