"""RULER's scores as a share of the full model's, and the mean score and the loss against the KV cache; pass keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from spanformer.report.drawing import DPI, GREY, colours, grid, log_ticks, plain, save_figure, subplots
from spanformer.report.ruler_table import Row, ceiling_of, kv_bytes, mean_score, task_score

NAME = 84
"""characters of a row's name"""
KEPT = {"@preset:": "learned spans ", "@": "uniform windows, ", "": "everything"}
"""by what follows the model in a row's name"""
MARKERS = {"everything": "o", "learned spans": "s", "uniform windows": "^"}
"""of points, by how the row's name begins; others have a D: there are fewer colours than rows"""


def short_names(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of one model by what they keep: "everything, 8 bits", "uniform windows, 0.33"."""
    if len({row["of"] for row in rows.values()}) > 1:
        return dict(rows)
    return {_short(name, row["of"]): row for name, row in rows.items()}


def _short(name: str, model: str) -> str:
    own = re.compile(f"(^|bytes of ){re.escape(model)}(@preset:|@|(?=,)|$)")
    return own.sub(lambda found: found[1] + KEPT[found[2]], name)


def draw_ruler(rows: Mapping[str, Row], path: Path) -> Path:
    """rows: those of `bench ruler`, in the order in which they are drawn."""
    rows = short_names(rows)
    tasks = list(next(iter(rows.values()))["tasks"])
    high = 0.46 * len(rows) + 1.5
    figure, axes = subplots(
        2, 2, width=max(10.0, 0.78 * len(tasks) + 5.2), height=high + 3.6, height_ratios=[high, 3.4]
    )  # fmt: skip
    figure.set_layout_engine("constrained")
    above = figure.add_subplot(axes[0, 0].get_gridspec()[0, :])
    for axis in axes[0]:
        axis.remove()
    _cells(above, rows, tasks)
    colour = dict(zip(rows, colours(len(rows)), strict=True))
    marks = [_point(axes[1, 0], name, kv_bytes(row), mean_score(row), colour[name]) for name, row in rows.items()]
    axes[1, 0].set_ylabel("mean score, %")
    axes[1, 0].set_xlabel("KV cache of the prompts, MB")
    sizes = [kv_bytes(row) / 1e6 for row in rows.values()]
    measured = {name: row["loss"] for name, row in rows.items() if "kv_bytes" in (row.get("loss") or {})}
    for name, loss in measured.items():
        _point(axes[1, 1], name, loss["kv_bytes"], loss["bits_per_byte"], colour[name])
    if not measured:
        axes[1, 1].text(0.5, 0.5, "not measured", ha="center", transform=axes[1, 1].transAxes, color=GREY)
    axes[1, 1].set_ylabel("bits per byte (lower is better)")
    axes[1, 1].set_xlabel("KV cache of the texts, MB")
    for axis in axes[1]:
        axis.set_xscale("log")
        log_ticks(axis.xaxis, sizes, lambda value: f"{value:,.3g}")
        grid(axis)
    figure.legend(marks, [plain(name, NAME) for name in rows], loc="outside lower center", ncols=2, fontsize=8,
                  frameon=False)  # fmt: skip
    figure.suptitle("RULER from a smaller KV cache", fontweight="bold", fontsize=13)
    return save_figure(figure, path, DPI)


def _point(axis, name: str, held: float, y: float, colour: str):
    marker = next((mark for begin, mark in MARKERS.items() if name.startswith(begin)), "D")
    return axis.scatter([held / 1e6], [y], s=55, color=colour, marker=marker, zorder=3)


def _cells(axis, rows: Mapping[str, Row], tasks: list[str]) -> None:
    """Each score above the full model's; the colour is their quotient."""
    shares: list[list[float]] = []
    for y, (name, row) in enumerate(rows.items()):
        top = ceiling_of(name, rows)
        full = None if top is None else rows[top]
        scores = [*(task_score(row, task) for task in tasks), mean_score(row)]
        above = None if full is None else [*(task_score(full, task) for task in tasks), mean_score(full)]
        shares.append([])
        for x, mine in enumerate(scores):
            share = min(1.0, mine / above[x]) if above and above[x] > 0 else float("nan")
            shares[-1].append(share)
            text = f"{mine:.0f}" if above is None or top == name else f"{mine:.0f} / {above[x]:.0f}"
            axis.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if share > 0.7 else "black")
    axis.imshow(shares, cmap="YlGn", vmin=0, vmax=1, aspect="auto")
    axis.set_facecolor("#e5e5e5")
    axis.axvline(len(tasks) - 0.5, color="white", linewidth=3)
    axis.set_xticks(range(len(tasks) + 1), [*(plain(task, 24) for task in tasks), "mean"], rotation=35, fontsize=8,
                    ha="right")  # fmt: skip
    axis.set_yticks(range(len(rows)), [f"{plain(name, NAME)}, {kv_bytes(row) / 1e6:.1f} MB"
                                       for name, row in rows.items()], fontsize=8)  # fmt: skip
    axis.set_title("score / the full model's, %; grey: the full model has none either", fontsize=9, loc="left")


def draw_needles(rows: Mapping[str, Row], path: Path) -> Path:
    """Pass keys found by depth and length: a panel for each row that was asked for them."""
    asked = {name: row["needles"] for name, row in short_names(rows).items() if row.get("needles")}
    columns = min(3, len(asked))
    lines = -(-len(asked) // columns)
    figure, axes = subplots(lines, columns, width=4.3 * columns, height=2.1 * lines + 0.9)
    figure.set_layout_engine("constrained")
    for axis in axes.ravel()[len(asked) :]:
        axis.axis("off")
    for axis, (name, found) in zip(axes.ravel(), asked.items(), strict=False):
        contexts, depths = (sorted({each[key] for each in found}) for key in ("context", "depth"))
        at = {(each["context"], each["depth"]): 100 * each["accuracy"] for each in found}
        shown = [[at.get((n, depth), float("nan")) for depth in depths] for n in contexts]
        axis.imshow(shown, cmap="YlGn", vmin=0, vmax=100, aspect="auto", origin="lower")
        for y, line in enumerate(shown):
            for x, value in enumerate(line):
                axis.text(x, y, f"{value:.0f}", ha="center", va="center", fontsize=8,
                          color="white" if value > 60 else "black")  # fmt: skip
        axis.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths], fontsize=8)
        axis.set_yticks(range(len(contexts)), [f"{n:,}" for n in contexts], fontsize=8)
        axis.set_title(plain(name, NAME), fontsize=9)
    figure.supxlabel("depth of the pass key: 0 the beginning, 1 just before the question; found, %", fontsize=9)
    figure.supylabel("tokens", fontsize=9)
    return save_figure(figure, path, DPI)
