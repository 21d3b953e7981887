"""Images that a model drew: a grid of samples, or columns of one half, its completions and the original.

Shapes: n images of H × W pixels and C channels, levels 0 … levels − 1.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from spanformer.report.drawing import DPI, FAINT, RED, frame, plain, save_figure, subplots

SIDE = 0.95
"""inches of an image"""


def draw_samples(images: np.ndarray, levels: int, model: str, how: str, path: Path) -> Path:
    """images [n, H, W, C]; how: how they were drawn, in a few words."""
    columns = math.ceil(math.sqrt(len(images)))
    lines = math.ceil(len(images) / columns)
    figure, axes = subplots(lines, columns, width=max(4.5, columns * SIDE), height=lines * SIDE + 1.0)
    for at, axis in enumerate(axes.ravel()):
        _show(axis, images[at] if at < len(images) else None, levels)
    frame(
        figure, f"{len(images)} images that {plain(model)} drew", f"Each was drawn pixel by pixel, from nothing; {how}."
    )
    return save_figure(figure, path, DPI)


def draw_completions(
    originals: np.ndarray, completed: list[np.ndarray], levels: int, model: str, how: str, path: Path
) -> Path:
    """originals [n, H, W, C]; completed: several times the same, each with other lower halves."""
    rows = ["given", *(f"completed {n}" for n in range(1, len(completed) + 1)), "original"]
    figure, axes = subplots(len(rows), len(originals), width=max(5.0, len(originals) * SIDE + 1.2),
                            height=len(rows) * SIDE + 1.0)  # fmt: skip
    half = originals.shape[1] // 2
    for line, (name, images) in enumerate(zip(rows, [originals, *completed, originals], strict=True)):
        for axis, image in zip(axes[line], images, strict=True):
            _show(axis, image[:half] if line == 0 else image, levels, whole=image.shape[0])
            if 0 < line < len(rows) - 1:  # where the model began
                axis.axhline(half - 0.5, color=RED, linewidth=1.2)
        axes[line, 0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    below = f"{plain(model)} was given the upper half of each image and drew what is below the red line; {how}."
    frame(figure, "Images completed from their upper halves", below)
    return save_figure(figure, path, DPI)


def _show(axis, image: np.ndarray | None, levels: int, whole: int = 0) -> None:
    """One image [H, W, C] without ticks; whole: lines of the complete image, if this is its upper part."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(image is not None)
    axis.spines[:].set_color(FAINT)
    if image is not None:
        shown = image / (levels - 1)
        axis.imshow(
            shown if shown.shape[2] == 3 else shown[..., 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest"
        )
        axis.set_ylim((whole or len(image)) - 0.5, -0.5)
        axis.set_aspect("equal", adjustable="box")
