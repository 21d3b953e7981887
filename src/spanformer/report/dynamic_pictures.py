"""Dynamic spans along a text, character by character: the paper's Figure 5."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from spanformer.report.drawing import CYCLE, GREY, Picture, frame, plain, small_print, subplots
from spanformer.report.events import Run
from spanformer.report.measures import tokens

WIDE, LINES, NAMED = 80, 4, 5  # characters a line, lines of text, heads in colour
FONT = "DejaVu Sans Mono"
SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}


def dynamic_picture(run: Run) -> Picture | None:
    """Spans of the heads that vary most, at each character of the text; the other heads in grey."""
    row = next((row for row in reversed(run.dynamics) if row.text), None)
    if row is None:
        return None
    text, spans = row.text[: WIDE * LINES], row.spans[:, : WIDE * LINES]
    varied = np.argsort(-np.nan_to_num(spans).std(axis=1), kind="stable")[:NAMED]
    parts = range(0, len(text), WIDE)
    width = 1.9 + 0.128 * max(30, min(WIDE, len(text)))
    figure, axes = subplots(len(parts), 1, width=width, height=1.3 + 2.3 * len(parts), sharey=True)
    for axis, first in zip(axes[:, 0], parts, strict=True):
        piece, some = text[first : first + WIDE], spans[:, first : first + WIDE]
        for at, line in enumerate(some):
            if at not in varied:
                axis.plot(line, color=GREY, alpha=0.35, linewidth=0.9)
        for at, colour in zip(varied, CYCLE, strict=False):
            axis.plot(some[at], color=colour, linewidth=1.8, marker="o", markersize=2.5)
        write_below(axis, piece, min(WIDE, max(30, len(text))))
        axis.set_ylabel("span (tokens)")
        axis.set_ylim(bottom=0)
    cut = "" if len(text) == len(row.text) else f" The first {len(text):,} of {len(row.text):,} characters."
    below = f"Spaces are shaded. In colour the heads that vary most, the others in grey.{cut}\n{small_print(run)}"
    frame(figure, f"How far heads look back at each character, after step {row.step:,}", below, beside=1.2)
    for line, (at, colour) in enumerate(zip(varied, CYCLE, strict=False)):
        axes[0, 0].annotate(plain(row.names[at], 24), (1, 1), xytext=(6, -4 - 13 * line), xycoords="axes fraction",
                            textcoords="offset points", va="top", fontsize=8, color=colour, fontweight="bold",
                            annotation_clip=False)  # fmt: skip
    return Picture("dynamic-spans", "Dynamic spans along a text", _sentence(text, spans, row.names, varied[0]), figure)


def write_below(axis: Any, piece: str, width: int) -> None:
    """One character at each place of the horizontal axis, `width` places in all; spaces are shaded."""
    axis.set_xticks(range(len(piece)), [plain(SHOWN.get(c, c), family=FONT) for c in piece], family=FONT, fontsize=9)
    for at, char in enumerate(piece):
        if char.isspace():
            axis.axvline(at, color="#eeeeee", linewidth=3.0, zorder=0)
    axis.tick_params(axis="x", length=0)
    axis.spines["bottom"].set_bounds(-0.7, len(piece) - 0.3)
    axis.set_xlim(-0.7, width - 0.3)


def _sentence(text: str, spans: np.ndarray, names: list[str], at: int) -> str:
    line = spans[at]
    if not np.isfinite(line).any():
        return "No head has a span to show along this text."
    high = int(np.nanargmax(line))
    said = (
        f"{names[at]} varies most, from {tokens(float(np.nanmin(line)))} to {tokens(float(line[high]))} tokens; it "
        f"looks farthest at {text[high]!r} in {text[max(0, high - 12) : high + 1]!r}"
    )
    starts = np.array([before.isspace() and not char.isspace() for before, char in pairwise(text)])
    if starts.any() and (~starts).any():
        begin, inside = np.nanmean(line[1:][starts]), np.nanmean(line[1:][~starts])
        said += (
            f", and sees {tokens(float(begin))} tokens where a word begins against {tokens(float(inside))} elsewhere"
        )
    return said + "."
