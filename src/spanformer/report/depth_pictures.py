"""Layers along a text, character by character: where halting or exits spend their layers."""

from __future__ import annotations

import numpy as np

from spanformer.report.drawing import CYCLE, Picture, frame, small_print, subplots
from spanformer.report.dynamic_pictures import LINES, WIDE, write_below
from spanformer.report.events import Run

SHORT = 40  # characters: the title needs as much room


def depth_picture(run: Run) -> Picture | None:
    """The layers that each character took."""
    row = next((row for row in reversed(run.depths) if row.text), None)
    if row is None:
        return None
    text, layers = row.text[: WIDE * LINES], np.array(row.layers[: WIDE * LINES])
    parts = range(0, len(text), WIDE)
    width = 1.9 + 0.128 * max(SHORT, min(WIDE, len(text)))
    figure, axes = subplots(len(parts), 1, width=width, height=1.3 + 1.8 * len(parts), sharey=True)
    for axis, first in zip(axes[:, 0], parts, strict=True):
        some = layers[first : first + WIDE]
        axis.bar(range(len(some)), some, width=0.8, color=CYCLE[0])
        axis.axhline(row.most, color="black", linewidth=0.8, linestyle=":")
        write_below(axis, text[first : first + WIDE], min(WIDE, max(SHORT, len(text))))
        axis.set_ylabel("layers")
        axis.set_ylim(0, row.most * 1.05)
    mean = float(layers.mean())
    below = f"Spaces are shaded; the dotted line is all {row.most} layers.\n{small_print(run)}"
    frame(figure, f"Layers of each character, after step {row.step:,}: {mean:.1f} of {row.most} on average", below)
    deepest = int(layers.argmax())
    said = (
        f"A character takes {mean:.1f} of {row.most} layers on average, from {layers.min()} to {layers.max()}; the "
        f"first that takes most is {text[deepest]!r} in {text[max(0, deepest - 12) : deepest + 1]!r}."
    )
    return Picture("depth", "Layers along a text", said, figure)
