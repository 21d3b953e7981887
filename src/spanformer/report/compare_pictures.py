"""Pictures of several runs together: quality side by side, quality against cost, and a sweep over the span limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spanformer.report.drawing import (
    CYCLE,
    GREY,
    Picture,
    bits_axis,
    frame,
    grid,
    label_ends,
    log_ticks,
    plain,
    subplots,
    time_unit,
    whole_steps,
)
from spanformer.report.events import Run
from spanformer.report.measures import amount, lasting, looks_back, predicted, quality, seconds_per_step, tokens
from spanformer.report.rows import LARGEST


def compare_pictures(runs: Sequence[Run], names: Sequence[str]) -> list[Picture]:
    """Every picture these runs allow together; names: one for each run, no two alike."""
    named = {name: run for name, run in zip(names, runs, strict=True) if len(quality(run).bits)}
    if len(named) < 2 or len({run.start.unit for run in named.values()}) > 1:
        return []
    pictures = (bits_picture(named), pareto_picture(named), sweep_picture(list(named.values())))
    return [picture for picture in pictures if picture is not None]


def bits_picture(named: dict[str, Run]) -> Picture:
    """Bits of every run against steps and against training time."""
    unit = next(iter(named.values())).start.unit
    curves = {name: quality(run) for name, run in named.items()}
    second, seconds_name = time_unit(max(float(curve.seconds[-1]) for curve in curves.values()))
    figure, ((by_step, by_time),) = subplots(1, 2, width=13.0, height=max(4.6, 1.6 + 0.17 * len(named)), sharey=True)
    for axis, x_of in ((by_step, lambda curve: curve.steps), (by_time, lambda curve: curve.seconds / second)):
        for curve, colour in zip(curves.values(), _colours(len(curves)), strict=True):
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
    below += f" Smoothed training bits, for want of others: {', '.join(plain(name) for name in unseen)}." * bool(unseen)
    frame(figure, f"Bits per {unit}, run by run", below, beside=2.2)
    ends = [
        (float(curve.bits[-1]), f"{plain(name, 26)} {curve.bits[-1]:.3f}", colour)
        for (name, curve), colour in zip(curves.items(), _colours(len(curves)), strict=True)
    ]
    for axis in (by_step, by_time):
        label_ends(axis, [(axis.get_xlim()[1], *end) for end in ends])
    best = min(curves, key=lambda name: curves[name].bits[-1])
    worst = max(curves, key=lambda name: curves[name].bits[-1])
    sentence = f"{best} ends lowest, at {curves[best].bits[-1]:.3f} bits per {unit} after "
    sentence += f"{lasting(curves[best].seconds[-1])}; {worst} ends highest, at {curves[worst].bits[-1]:.3f} after "
    sentence += f"{lasting(curves[worst].seconds[-1])}."
    return Picture("compare-bits", "Quality, run by run", sentence, figure)


def pareto_picture(named: dict[str, Run]) -> Picture | None:
    """Final bits against predicted attention cost and against the time of a step; the front joins the best."""
    axes_of = {
        "attention FLOPs per token, predicted": {name: attention_per_token(run) for name, run in named.items()},
        "time of a training step, measured": {name: seconds_per_step(run) for name, run in named.items()},
    }
    axes_of = {
        label: found
        for label, costs in axes_of.items()
        if len(found := {name: cost for name, cost in costs.items() if math.isfinite(cost) and cost > 0}) > 1
    }
    if not axes_of:
        return None
    unit = next(iter(named.values())).start.unit
    colours = dict(zip(named, _colours(len(named)), strict=True))
    figure, axes = subplots(1, len(axes_of), width=7.2 * len(axes_of), height=5.0, sharey=True)
    fronts = {}
    for axis, (label, costs) in zip(axes[0], axes_of.items(), strict=True):
        points = {name: (cost, float(quality(named[name]).bits[-1])) for name, cost in costs.items()}
        fronts[label] = front = pareto_front(points)
        axis.set_xscale("log")
        axis.plot(*zip(*(points[name] for name in front), strict=True), color=GREY, drawstyle="steps-post",
                  linewidth=1.4, linestyle="--", zorder=1)  # fmt: skip
        for name, (x, y) in points.items():
            axis.scatter([x], [y], s=60, color=colours[name] if name in front else "white", edgecolor=colours[name],
                         linewidth=1.6, zorder=3)  # fmt: skip
        log_ticks(axis.xaxis, [x for x, _ in points.values()], amount if "FLOPs" in label else lasting)
        axis.set_xlabel(label)
        axis.tick_params(labelleft=True)
        axis.margins(0.12)
        grid(axis)
        axis.points = points
    axes[0, 0].set_ylabel(f"final bits per {unit} (lower is better)")
    below = "Filled: no other run is both better and cheaper; the dashed line joins these. Left and down is better."
    frame(figure, "Quality against cost", below, beside=1.0)
    for axis in axes[0]:
        _label_points(axis, axis.points, colours)
    label, front = next(iter(fronts.items()))
    sentence = f"By {label}, no run is both better and cheaper than {_listed(front)}"
    beaten = [name for name in axes_of[label] if name not in front]
    sentence += f"; {_listed(beaten)} {'is' if len(beaten) == 1 else 'are'} beaten on both." if beaten else "."
    return Picture("compare-cost", "Quality against cost", sentence, figure)


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names that no other point beats, being nowhere worse and somewhere better; in ascending order of cost."""
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    front = [name for name, here in points.items() if not any(beats(other, here) for other in points.values())]
    return sorted(front, key=lambda name: points[name])


def sweep_picture(runs: list[Run]) -> Picture | None:
    """The paper's Figure 3: quality, average span and attention cost against the span limit, by kind of attention."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        if run.steps:
            kinds.setdefault(kind_of(run), []).append(run)
    if len({limit_of(run) for some in kinds.values() for run in some}) < 2:
        return None
    unit = runs[0].start.unit
    panels = {
        f"final bits per {unit} (lower is better)": lambda run: float(quality(run).bits[-1]),
        "average span (tokens)": lambda run: float(looks_back(run.steps[-1]).mean()),
        "attention FLOPs per token, predicted": attention_per_token,
    }
    figure, axes = subplots(1, 3, width=14.5, height=4.7)
    for axis, (label, value_of) in zip(axes[0], panels.items(), strict=True):
        axis.ends = []
        for (kind, some), colour in zip(kinds.items(), _colours(len(kinds)), strict=True):
            x, y = _by_limit(some, value_of)
            axis.plot(x, y, color=colour, linewidth=2.2, marker="o", markersize=5)
            axis.ends.append((y[-1], plain(kind, 24), colour))
        axis.set_xscale("log", base=2)
        limits = sorted({limit_of(run) for some in kinds.values() for run in some})
        _limit_ticks(axis, limits)
        axis.set_xlabel("span limit (tokens)")
        axis.set_title(label, loc="left", fontsize=10)
        grid(axis)
    for axis, show in ((axes[0, 1], tokens), (axes[0, 2], amount)):
        axis.set_yscale("log")
        log_ticks(axis.yaxis, [y for line in axis.lines for y in line.get_ydata()], show)
    below = "Where several runs share a limit and a kind, their mean."
    frame(figure, "What a larger span limit brings, and what it costs", below, beside=1.15)
    for axis in axes[0]:
        label_ends(axis, [(axis.get_xlim()[1], *end) for end in axis.ends])
    return Picture("sweep", "Sweep over the span limit", _sweep_sentence(kinds, unit), figure)


def _sweep_sentence(kinds: dict[str, list[Run]], unit: str) -> str:
    said = []
    for kind, some in kinds.items():
        limits, bits = _by_limit(some, lambda run: float(quality(run).bits[-1]))
        _, spans = _by_limit(some, lambda run: float(looks_back(run.steps[-1]).mean()))
        _, costs = _by_limit(some, attention_per_token)
        if len(limits) > 1:
            said.append(
                f"{kind}: from a limit of {limits[0]:,.0f} to {limits[-1]:,.0f} bits per {unit} go from {bits[0]:.3f} "
                f"to {bits[-1]:.3f}, the average span from {tokens(spans[0])} to {tokens(spans[-1])} tokens and "
                f"attention costs {costs[-1] / costs[0]:.3g} times as much"
            )
    return "; ".join(said) + "." if said else "Each kind of attention was trained with one limit only."


def attention_per_token(run: Run) -> float:
    """Predicted operations for each token that the spans decide; NaN for a run without steps."""
    costs = predicted(run)
    return costs[0].by_span / run.start.shape.tokens if costs else math.nan


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


def _colours(count: int) -> list[str]:
    return [CYCLE[at % len(CYCLE)] for at in range(count)]


def _limit_ticks(axis, limits: list[int]) -> None:
    """Each limit named, but those whose names would touch the one before."""
    kept = [limits[0]]
    for limit in limits[1:]:
        if limit >= 1.7 * kept[-1]:
            kept.append(limit)
    axis.set_xticks(kept, [f"{limit:,}" for limit in kept])
    axis.xaxis.minorticks_off()


def _label_points(axis, points: dict[str, tuple[float, float]], colours: dict[str, str]) -> None:
    """Each point's name at the first of four places beside it where it touches no point and no other name."""
    scale = 72 / axis.figure.dpi
    edge = axis.transAxes.transform((0, 0))[0] * scale
    where = {name: tuple(axis.transData.transform(place) * scale) for name, place in points.items()}
    taken = {name: [(x - 5, y - 5, x + 5, y + 5)] for name, (x, y) in where.items()}  # boxes: left, low, right, high
    for name, (x, y) in where.items():
        wide = 5.6 * len(plain(name, 26))
        others = [box for other, boxes in taken.items() if other != name for box in boxes]
        places = [(right, up, _box(x, y, wide, right, up)) for right, up in ((1, 1), (-1, -1), (1, -1), (-1, 1))]
        inside = [place for place in places if place[2][0] > edge]
        free = [place for place in inside if not any(_touch(place[2], box) for box in others)]
        right, up, box = (free or places)[0]
        taken[name].append(box)
        axis.annotate(plain(name, 26), points[name], xytext=(5 * right, 9 * up), textcoords="offset points",
                      ha="left" if right > 0 else "right", va="center", fontsize=8, color=colours[name],
                      fontweight="bold", annotation_clip=False)  # fmt: skip


def _box(x: float, y: float, wide: float, right: int, up: int) -> tuple[float, float, float, float]:
    left = x + 5 if right > 0 else x - 5 - wide
    return left, y + 9 * up - 5, left + wide, y + 9 * up + 5


def _touch(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
