"""The use of long context: loss by position, facts by distance, and each of them against what a token costs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spanformer.report.drawing import DPI, GREY, colours, grid, log_ticks, plain, save_figure, subplots
from spanformer.report.pareto import pareto_front

ASKED = {"key": "pass key", "pair": "recall", "copy": "copy"}
COSTS = {
    "kv_bytes": ("KV cache, MiB", 2.0**20),
    "flops": ("MFLOPs of a token", 1e6),
    "seconds": ("ms of a token", 1e-3),
}


def draw_context(rows: Mapping[str, dict[str, Any]], path: Path) -> Path:
    """rows: those of `bench context`, by model."""
    figure, axes = subplots(3, 3, width=13.5, height=11.5)
    colour = dict(zip(rows, colours(len(rows)), strict=True))
    figure.set_layout_engine("constrained")
    _losses(axes[0, 0], rows, colour, "text", "prose: loss by position")
    _losses(axes[0, 1], rows, colour, "code", "long code: loss by position")
    for axis, (task, title) in zip([axes[0, 2], axes[1, 0], axes[1, 1]], ASKED.items(), strict=True):
        _facts(axis, rows, colour, task, title)
    lines = axes[0, 1].get_lines()
    axes[1, 2].axis("off")
    axes[1, 2].legend(lines, list(map(plain, rows)), loc="center left", frameon=False, fontsize=10)
    missed = {name: 100 - 100 * _mean(row) for name, row in rows.items()}
    for axis, cost in zip(axes[2], COSTS, strict=True):
        _front(axis, rows, colour, missed, cost)
    figure.suptitle("What a model makes of long context, and what the context costs", fontweight="bold", fontsize=14)
    return save_figure(figure, path, DPI)


def _losses(axis, rows, colour, part: str, title: str) -> None:
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    for name, row in rows.items():
        found = row.get(part, [])
        at = [each["to"] for each in found]
        axis.plot(at, [each["bits"] for each in found], "o-", color=colour[name], ms=4)
        axis.set_xticks(at, [f"{n:,}" for n in at])
    axis.set_xlabel("position in tokens, up to")
    axis.set_ylabel("bits per byte (lower is better)")
    if not any(part in row for row in rows.values()):
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes, color=GREY)
    grid(axis)


def _facts(axis, rows, colour, task: str, title: str) -> None:
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    for name, row in rows.items():
        at = sorted(map(int, row[task]))
        axis.plot(at, [100 * row[task][str(n)] for n in at], "o-", color=colour[name], ms=4)
        axis.set_xticks(at, [f"{n:,}" for n in at])
    axis.set_ylim(-3, 103)
    axis.set_xlabel("distance in tokens")
    axis.set_ylabel("right, %")
    grid(axis)


def _mean(row: dict[str, Any]) -> float:
    """The share of facts found, the mean over tasks and distances."""
    found = [share for task in ASKED for share in row[task].values()]
    return sum(found) / len(found)


def _front(axis, rows, colour, missed: dict[str, float], cost: str) -> None:
    """Facts missed against a cost; filled points are those that no other model beats in both."""
    label, unit = COSTS[cost]
    points = {name: (row[cost] / unit, missed[name]) for name, row in rows.items() if row[cost]}
    front = pareto_front(points)
    if front:
        axis.plot(*zip(*(points[name] for name in front), strict=True), color=GREY, linestyle="--",
                  drawstyle="steps-post", zorder=1)  # fmt: skip
    for name, (x, y) in points.items():
        axis.scatter([x], [y], s=60, edgecolor=colour[name], color=colour[name] if name in front else "white", zorder=3)
    axis.set_title("Pareto front (filled): left and down is better", fontsize=10)
    axis.set_xscale("log")
    log_ticks(axis.xaxis, [x for x, _ in points.values()], lambda value: f"{value:,.4g}")
    axis.set_ylim(-3, 103)
    axis.set_xlabel(label)
    axis.set_ylabel("facts missed, %")
    grid(axis)
