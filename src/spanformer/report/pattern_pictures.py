"""Pictures of what heads see: a square for each pair of query and key."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from spanformer.report.drawing import FAINT, GREEN, Picture, frame, plain, subplots

GRID = 72  # tokens: up to this size, lines separate the squares
COLUMNS = 4


def pattern_picture(name: str, seen: Mapping[str, np.ndarray], sentence: str, *, causal: bool) -> Picture:
    """seen: [n, n] of bool (or of shares, 0 … 1) by title: one picture of a pattern, or one for each kind of
    head."""
    columns = min(COLUMNS, len(seen))
    lines = -(-len(seen) // columns)
    side = 4.4 if columns == 1 else 3.1
    width = max(5.2, 0.5 + side * columns)
    wrapped = textwrap.wrap(plain(sentence, 400), round(17 * width))
    height = 1.05 + (side + 0.25) * lines + 0.16 * (len(wrapped) - 1)
    figure, axes = subplots(lines, columns, width=width, height=height)
    for axis in axes.ravel()[len(seen) :]:
        axis.set_visible(False)
    for axis, (title, matrix) in zip(axes.ravel(), seen.items(), strict=False):
        draw_pattern(axis, matrix, causal=causal)
        if len(seen) > 1:
            axis.set_title(plain(title, 40), fontsize=9, loc="left")
    below = "A row is a query, a column a key: green where the query sees the key" + (
        ", grey where it may not." if causal else "."
    )
    frame(figure, plain(name, 64), "\n".join([below, *wrapped]))
    return Picture("pattern", name, sentence, figure)


def draw_pattern(axis: Any, matrix: np.ndarray, *, causal: bool) -> None:
    """One matrix, drawn on an axis; the future is grey if causal."""
    from matplotlib.colors import LinearSegmentedColormap

    n = len(matrix)
    colours = LinearSegmentedColormap.from_list("seen", ["#ffffff", GREEN])
    shown = np.ma.masked_where(np.triu(np.ones((n, n), bool), 1) & causal, matrix.astype(float))
    axis.set_facecolor("#ededed")
    axis.imshow(shown, cmap=colours, vmin=0, vmax=1, interpolation="nearest")
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("#c8c8c8")
    axis.tick_params(length=0, labelsize=7)
    ticks = _ticks(n)
    axis.set_xticks(ticks)
    axis.set_yticks(ticks)
    axis.xaxis.tick_top()
    if n <= GRID:
        for at in range(1, n):
            axis.axhline(at - 0.5, color=FAINT, linewidth=0.35)
            axis.axvline(at - 0.5, color=FAINT, linewidth=0.35)


def _ticks(n: int) -> list[int]:
    """Four or so round positions, and the first."""
    step = max(1, 2 ** round(np.log2(max(n / 4, 1))))
    return list(range(0, n, step))
