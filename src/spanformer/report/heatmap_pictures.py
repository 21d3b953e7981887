"""Pictures of attention weights: every head of every layer over one text, and one head with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spanformer.report.drawing import GREEN, Picture, frame, plain, subplots

NAMED = 90  # tokens: more names than this cannot be read beside a picture
SMALL = 14  # tokens: so few are named beside every small picture too


def maps_picture(maps: Sequence[np.ndarray], labels: Sequence[str], name: str) -> Picture:
    """maps: [layers] of [H, T, T]."""
    layers, heads, count = len(maps), len(maps[0]), len(labels)
    few = count <= SMALL
    side = 2.1 if few else 1.55
    figure, axes = subplots(
        layers, heads, width=max(6.5, 0.9 + side * heads), height=1.1 + (side + 0.12) * layers, sharex=True, sharey=True
    )
    for layer, (row, found) in enumerate(zip(axes, maps, strict=True), 1):
        for head, (axis, weights) in enumerate(zip(row, found, strict=True), 1):
            draw_weights(axis, weights)
            if layer == 1:
                axis.set_title(f"head {head}", fontsize=8, pad=3)
            if head == 1:
                axis.set_ylabel(f"layer {layer}", fontsize=8)
            if few:
                _name_tokens(axis, labels, 6)
            else:
                axis.set_xticks([])
                axis.set_yticks([])
    below = "A row is a query, a column a key; the darker, the more of its attention the query gives to the key."
    frame(figure, f"Where each head of {plain(name)} looks", below)
    return Picture("heatmap", "Attention of every head", _sentence(maps), figure)


def head_picture(weights: np.ndarray, labels: Sequence[str], layer: int, head: int) -> Picture:
    """weights [T, T] of one head, with its tokens beside it; layer and head count from 1."""
    count = len(labels)
    size = min(12.0, max(4.6, 1.6 + 0.17 * count))
    figure, ((axis,),) = subplots(1, 1, width=size + 0.9, height=size + 0.55)
    mesh = draw_weights(axis, weights)
    if count <= NAMED:
        _name_tokens(axis, labels, 8 if count <= 50 else 6)
    axis.set_ylabel("query")
    axis.set_xlabel("key")
    bar = figure.colorbar(mesh, ax=axis, fraction=0.04, pad=0.02)
    bar.set_label("share of the query's attention")
    bar.set_ticks([0, 0.05, 0.25, 0.5, 1], labels=["0", "5 %", "25 %", "50 %", "100 %"])
    bar.outline.set_visible(False)
    frame(
        figure, f"Layer {layer}, head {head}", "Colours follow the square root of the weight, so that small ones show."
    )
    return Picture(
        f"heatmap-layer{layer}-head{head}", f"Layer {layer}, head {head}", _sentence([weights[None]]), figure
    )


def farthest(maps: Sequence[np.ndarray], layer: int = 0, head: int = 0) -> tuple[int, int]:
    """The (layer, head), counted from 1, that looks farthest; of one layer or one head alone, if it is not 0."""
    places = [(at, of) for at in range(1, len(maps) + 1) for of in range(1, len(maps[0]) + 1)]
    fitting = [place for place in places if layer in (0, place[0]) and head in (0, place[1])]
    return max(fitting, key=lambda place: _distance(maps[place[0] - 1][place[1] - 1]))


def draw_weights(axis, weights: np.ndarray):
    """weights [n, n] in 0 … 1 on an axis."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("weights", ["#ffffff", "#bfe3d3", GREEN, "#052e21"])
    mesh = axis.imshow(weights, cmap=colours, norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
    axis.spines[:].set_visible(True)
    axis.spines[:].set_color("#d0d0d0")
    axis.tick_params(length=0)
    return mesh


def _name_tokens(axis, labels: Sequence[str], size: int) -> None:
    names = [plain(label, 12) for label in labels]
    places = range(len(labels))
    axis.set_yticks(places, names, fontsize=size)
    turned = 90 if any(len(label) > 1 for label in labels) else 0
    axis.set_xticks(places, names, fontsize=size, rotation=turned)


def _sentence(maps: Sequence[np.ndarray]) -> str:
    """How far heads look, on average over queries and weights."""
    far = [[_distance(weights) for weights in layer] for layer in maps]
    away = "away" if any(np.triu(layer, 1).any() for layer in maps) else "back"
    flat = [(d, layer, head) for layer, row in enumerate(far, 1) for head, d in enumerate(row, 1)]
    if len(flat) == 1:
        return f"On average it looks {flat[0][0]:.1f} tokens {away}."
    (least, *nearest), (most, *farthest) = min(flat), max(flat)
    return (
        f"Weighted by attention, head {farthest[1]} of layer {farthest[0]} looks farthest, {most:.1f} tokens {away} on "
        f"average, and head {nearest[1]} of layer {nearest[0]} nearest, {least:.1f}."
    )


def _distance(weights: np.ndarray) -> float:
    at = np.arange(len(weights))
    total = weights.sum()
    return float((weights * np.abs(at[:, None] - at)).sum() / total) if total > 0 else 0.0
