"""Pictures of attention weights: every head of every layer over one text, and one head with its tokens."""

from __future__ import annotations

import numpy as np

from spanformer.report.drawing import GREEN, Picture, frame, plain, subplots
from spanformer.report.head_stats import HeadStats

NAMED = 90  # tokens: more names than this cannot be read beside a picture
NAME = 0.11  # inches that a small name takes
WIDEST = 17.0  # inches; names that would make the figure wider are left out


def maps_picture(stats: HeadStats, name: str) -> Picture:
    """Every head of every layer; name: the model's."""
    layers, heads = len(stats.maps), len(stats.maps[0])
    high, wide = NAME * len(stats.queries), NAME * len(stats.keys)
    named = high * layers <= WIDEST and wide * heads <= WIDEST
    high, wide = (max(1.55, inches) if named else 1.55 for inches in (high, wide))
    figure, axes = subplots(
        layers, heads, width=max(6.5, 1.4 + (wide + 0.2) * heads), height=1.5 + (high + 0.3) * layers, sharex=True,
        sharey=True,
    )  # fmt: skip
    for layer, (row, found) in enumerate(zip(axes, stats.maps, strict=True), 1):
        for head, (axis, weights) in enumerate(zip(row, found, strict=True), 1):
            draw_weights(axis, weights)
            if layer == 1:
                axis.set_title(f"head {head}", fontsize=8, pad=3)
            if layer == layers:
                axis.set_xlabel(stats.axes[1], fontsize=7)
            if head == 1:
                axis.set_ylabel(f"layer {layer}\n{stats.axes[0]}", fontsize=7)
            if named:
                _name_tokens(axis, stats, 6)
            else:
                axis.set_xticks([])
                axis.set_yticks([])
    below = f"{stats.rows.capitalize()}; the darker, the more of its attention the row gives to the column."
    frame(figure, stats.title(plain(name)), below)
    return Picture(_file(stats), "Attention of every head", stats.of_all(), figure)


def head_picture(stats: HeadStats, layer: int, head: int) -> Picture:
    """One head with its tokens beside it; layer and head count from 1."""
    high, wide = (min(12.0, max(4.6, 1.6 + 0.17 * len(tokens))) for tokens in (stats.queries, stats.keys))
    figure, ((axis,),) = subplots(1, 1, width=wide + 0.9, height=high + 0.55)
    mesh = draw_weights(axis, stats.maps[layer - 1][head - 1])
    _name_tokens(axis, stats, 8 if max(map(len, (stats.queries, stats.keys))) <= 50 else 6)
    axis.set_ylabel(stats.axes[0])
    axis.set_xlabel(stats.axes[1])
    bar = figure.colorbar(mesh, ax=axis, fraction=0.04, pad=0.02)
    bar.set_label("share of the row's attention")
    bar.set_ticks([0, 0.05, 0.25, 0.5, 1], labels=["0", "5 %", "25 %", "50 %", "100 %"])
    bar.outline.set_visible(False)
    title = f"{stats.part}{stats.part and ': '}layer {layer}, head {head}".capitalize()
    frame(figure, title, "Colours follow the square root of the weight, so that small ones show.")
    return Picture(f"{_file(stats)}-layer{layer}-head{head}", title, stats.of_one(layer, head), figure)


def draw_weights(axis, weights: np.ndarray):
    """weights [Tq, Tk] in 0 … 1 on an axis."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#bfe3d3", GREEN, "#052e21"])
    mesh = axis.imshow(weights, cmap=colours, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    axis.set_aspect("equal" if len(weights) == weights.shape[1] else "auto")  # two texts fill the place there is
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("#d0d0d0")
    axis.tick_params(length=0)
    return mesh


def _name_tokens(axis, stats: HeadStats, size: int) -> None:
    for along, tokens in ((axis.yaxis, stats.queries), (axis.xaxis, stats.keys)):
        if len(tokens) > NAMED:
            continue
        along.set_ticks(range(len(tokens)), [plain(token, 12) for token in tokens], fontsize=size)
        for tick, token in zip(along.get_major_ticks(), tokens, strict=True):
            tick.label1.set_rotation(90 if along is axis.xaxis and len(token) > 1 else 0)


def _file(stats: HeadStats) -> str:
    return "-".join(filter(None, ("heatmap", stats.part)))
