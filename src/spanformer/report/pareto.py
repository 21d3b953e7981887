"""Quality against cost: every run as a point, for each kind of cost, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spanformer.report.drawing import GREY, Picture, colours, frame, grid, log_ticks, plain, subplots
from spanformer.report.events import Run
from spanformer.report.measures import (
    amount,
    attention_per_token,
    counted_per_token,
    decimal,
    lasting,
    peak_bytes,
    quality,
    seconds_per_step,
)

FEW = 6  # runs: more names than these would cover each other; they get numbers, and a list beside the picture
Axis = tuple[str, Callable[[Run], float], Callable[[float], str]]
"""what it is called, a run's cost, and the words for a cost"""
TIME: Axis = ("time of a training step, measured", seconds_per_step, lasting)
MEMORY: Axis = ("peak memory of a training step, measured", peak_bytes, decimal)
COUNTED: Axis = ("FLOPs of a training token, counted", counted_per_token, amount)
PREDICTED: Axis = ("attention FLOPs per token, predicted", attention_per_token, amount)


def cost_axes(named: dict[str, Run]) -> dict[str, dict[str, float]]:
    """Each kind of cost by run, if at least two runs have it. Operations are
    those counted; if some run has no count, the predicted ones of attention."""
    found = {}
    for label, cost_of, _ in (COUNTED if known(COUNTED, list(named.values())) else PREDICTED, TIME, MEMORY):
        costs = {name: cost_of(run) for name, run in named.items()}
        found[label] = {name: cost for name, cost in costs.items() if math.isfinite(cost) and cost > 0}
    return {label: costs for label, costs in found.items() if len(costs) > 1}


def known(cost: Axis, runs: Sequence[Run]) -> bool:
    """Whether every run has this cost."""
    return all(math.isfinite(cost[1](run)) for run in runs)


def fronts(named: dict[str, Run]) -> dict[str, list[str]]:
    """For each kind of cost, the runs that no other beats, the cheapest first."""
    return {label: pareto_front(_points(named, costs)) for label, costs in cost_axes(named).items()}


def pareto_picture(named: dict[str, Run]) -> Picture | None:
    """Final bits against each kind of cost; the front joins the best."""
    axes_of = cost_axes(named)
    if not axes_of:
        return None
    unit = next(iter(named.values())).start.bits_unit
    colour = dict(zip(named, colours(len(named)), strict=True))
    many = len(named) > FEW
    figure, axes = subplots(1, len(axes_of), width=5.4 * len(axes_of) + 2.2 * many, height=4.8, sharey=True)
    best = fronts(named)
    show = {label: words for label, _, words in (COUNTED, PREDICTED, TIME, MEMORY)}
    for axis, (label, costs) in zip(axes[0], axes_of.items(), strict=True):
        points = _points(named, costs)
        front = best[label]
        axis.set_xscale("log")
        axis.plot(*zip(*(points[name] for name in front), strict=True), color=GREY, drawstyle="steps-post",
                  linewidth=1.4, linestyle="--", zorder=1)  # fmt: skip
        for name, (x, y) in points.items():
            axis.scatter([x], [y], s=60, color=colour[name] if name in front else "white", edgecolor=colour[name],
                         linewidth=1.6, zorder=3)  # fmt: skip
        log_ticks(axis.xaxis, [x for x, _ in points.values()], show[label])
        axis.set_xlabel(label)
        axis.tick_params(labelleft=True)
        axis.margins(0.12)
        grid(axis)
        axis.points = points
    axes[0, 0].set_ylabel(f"final bits per {unit} (lower is better)")
    below = "Filled: no other run is both better and cheaper; the dashed line joins these. Left and down is better."
    frame(figure, "Quality against cost", below, beside=0.25 if many else 1.0)
    numbers = {name: str(at) if many else name for at, name in enumerate(named, 1)}
    for axis in axes[0]:
        _label_points(axis, axis.points, colour, numbers)
    if many:
        _list_names(figure, axes[0], numbers, colour)
    label, front = next(iter(best.items()))
    sentence = f"By {label}, no run is both better and cheaper than {_listed(front)}"
    beaten = [name for name in axes_of[label] if name not in front]
    sentence += f"; {_listed(beaten)} {'is' if len(beaten) == 1 else 'are'} beaten on both." if beaten else "."
    return Picture("compare-cost", "Quality against cost", sentence, figure)


def _points(named: dict[str, Run], costs: dict[str, float]) -> dict[str, tuple[float, float]]:
    """(cost, final bits) of each run."""
    return {name: (cost, float(quality(named[name]).bits[-1])) for name, cost in costs.items()}


def _list_names(figure, axes, numbers: dict[str, str], colour: dict[str, str]) -> None:
    """A list of numbered runs, to the right of the last panel."""
    wide, high = figure.get_size_inches()
    first, keep = axes[0].get_position().x0, 1 - 2.2 / wide
    for axis in axes:
        box = axis.get_position()
        axis.set_position([first + (box.x0 - first) * keep, box.y0, box.width * keep, box.height])
    for at, (name, number) in enumerate(numbers.items()):
        figure.text(1 - 2.1 / wide, 1 - (0.62 + 0.17 * at) / high, f"{number:>2}  {plain(name, 30)}", fontsize=8,
                    color=colour[name], fontweight="bold", va="top")  # fmt: skip


def pareto_front(points: dict[str, tuple[float, float]]) -> list[str]:
    """Names of the points that no other dominates, in ascending order of cost."""
    beats = lambda a, b: a[0] <= b[0] and a[1] <= b[1] and a != b  # noqa: E731
    front = [name for name, here in points.items() if not any(beats(other, here) for other in points.values())]
    return sorted(front, key=lambda name: points[name])


def _label_points(axis, points: dict[str, tuple[float, float]], colour: dict[str, str], said: dict[str, str]) -> None:
    """Each point's name at the first of four places beside it where it touches no point and no other name."""
    scale = 72 / axis.figure.dpi
    edge = axis.transAxes.transform((0, 0))[0] * scale
    where = {name: tuple(axis.transData.transform(place) * scale) for name, place in points.items()}
    taken = {name: [(x - 5, y - 5, x + 5, y + 5)] for name, (x, y) in where.items()}  # boxes: left, low, right, high
    for name, (x, y) in where.items():
        wide = 5.6 * len(plain(said[name], 26))
        others = [box for other, boxes in taken.items() if other != name for box in boxes]
        places = [(right, up, _box(x, y, wide, right, up)) for right, up in ((1, 1), (-1, -1), (1, -1), (-1, 1))]
        inside = [place for place in places if place[2][0] > edge]
        free = [place for place in inside if not any(_touch(place[2], box) for box in others)]
        right, up, box = (free or places)[0]
        taken[name].append(box)
        axis.annotate(plain(said[name], 26), points[name], xytext=(5 * right, 9 * up), textcoords="offset points",
                      ha="left" if right > 0 else "right", va="center", fontsize=8, color=colour[name],
                      fontweight="bold", annotation_clip=False)  # fmt: skip


def _box(x: float, y: float, wide: float, right: int, up: int) -> tuple[float, float, float, float]:
    left = x + 5 if right > 0 else x - 5 - wide
    return left, y + 9 * up - 5, left + wide, y + 9 * up + 5


def _touch(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
