"""Right answers against the distance of what they ask for: a panel for each task, a line for each mechanism."""

from __future__ import annotations

from pathlib import Path

from spanformer.report.drawing import DPI, colours, grid, plain, save_figure, subplots


def draw_tasks(measured: dict[str, dict[str, dict]], path: Path) -> Path:
    """measured: {task: {kind: {"right": {distance: share}}}}."""
    kinds = list(dict.fromkeys(kind for rows in measured.values() for kind in rows))
    colour = dict(zip(kinds, colours(len(kinds)), strict=True))
    figure, (axes,) = subplots(1, len(measured), width=4.2 * len(measured) + 1.8, height=3.8, sharey=True)
    figure.set_layout_engine("constrained")
    lines = {}
    for axis, (name, rows) in zip(axes, measured.items(), strict=True):
        axis.set_title(name)
        axis.set_xscale("log", base=2)
        points = sorted({int(at) for row in rows.values() for at in row["right"]})
        axis.set_xticks(points, [str(at) for at in points])
        axis.set_xlabel("distance in tokens")
        for kind, row in rows.items():
            at = sorted(map(int, row["right"]))
            shares = [100 * row["right"][str(n)] for n in at]
            (lines[kind],) = axis.plot(at, shares, "o-", color=colour[kind], label=plain(kind), markersize=4)
        grid(axis)
    axes[0].set_ylabel("answers right, %")
    axes[0].set_ylim(-3, 103)
    figure.legend(list(lines.values()), list(map(plain, lines)), loc="outside right center", fontsize=8)
    return save_figure(figure, path, DPI)
