"""How far apart the learned spans of two models are: a table, and a picture of their distributions.

    distance = mean over layers, mean over ranks, |log2(1 + z) − log2(1 + z')|

z and z' are spans of the same rank among the heads of a layer: within a layer the order of heads means nothing. This is
the Wasserstein distance of the layers' distributions, in octaves; 1 is a factor of 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from spanformer.report.compare_table import markdown
from spanformer.report.drawing import DPI, colours, grid, plain, save_figure, span_ticks, subplots

Spans = Sequence[Sequence[float | None]]
"""[layers][heads] in tokens; None for a head that learns no span"""


def octaves(spans: Spans) -> np.ndarray:
    """[layers, heads] log2(1 + z), sorted within each layer; without layers that learn no span."""
    learned = [sorted(z for z in layer if z is not None) for layer in spans]
    kept = [layer for layer in learned if layer]
    if len(set(map(len, kept))) != 1:
        raise ValueError(f"heads with a span, by layer, are {[len(layer) for layer in kept]}; expected equally many")
    return np.log2(1 + np.array(kept, dtype=np.float64))


def distance(mine: Spans, theirs: Spans) -> float:
    """In octaves."""
    a, b = octaves(mine), octaves(theirs)
    if a.shape != b.shape:
        raise ValueError(
            f"one model has {a.shape[0]} layers of {a.shape[1]} heads with spans and the other {b.shape[0]} of "
            f"{b.shape[1]}; expected models of the same form"
        )
    return float(np.abs(a - b).mean())


def distribution_table(models: Mapping[str, Spans]) -> str:
    """Each model's spans in numbers, and its distance from every other."""
    header = ["model", "mean span", "median", "longest", *(f"to {name}" for name in models)]
    rows = []
    for name, spans in models.items():
        z = np.exp2(octaves(spans)) - 1
        far = ["0" if other == name else f"{distance(spans, models[other]):.2f}" for other in models]
        rows.append([name, *(f"{value:,.1f}" for value in (z.mean(), np.median(z), z.max())), *far])
    return markdown(header, rows)


def draw_distributions(models: Mapping[str, Spans], limit: int, path: Path) -> Path:
    """Left: the share of heads with at most this span. Right: mean spans by layer."""
    figure, ((all_heads, by_layer),) = subplots(1, 2, width=10.5, height=4.0)
    figure.set_layout_engine("constrained")
    ticks = span_ticks(limit)
    for (name, spans), colour in zip(models.items(), colours(len(models)), strict=True):
        found = octaves(spans)
        ranked = np.sort(found.ravel())
        share = np.arange(1, len(ranked) + 1) / len(ranked) * 100
        all_heads.step(np.append(ranked, np.log2(1 + limit)), np.append(share, 100), where="post", color=colour,
                       label=plain(name), linewidth=2)  # fmt: skip
        means = np.log2(1 + (np.exp2(found) - 1).mean(1))
        by_layer.plot(np.arange(len(found)) + 1, means, "o-", color=colour, markersize=4)
    all_heads.set_xticks(np.log2(1 + np.array(ticks)), [f"{tick:,}" for tick in ticks], rotation=45)
    all_heads.set_xlabel("span in tokens")
    all_heads.set_ylabel("heads with at most this span, %")
    by_layer.set_yticks(np.log2(1 + np.array(ticks)), [f"{tick:,}" for tick in ticks])
    by_layer.set_xticks(range(1, max(len(octaves(spans)) for spans in models.values()) + 1))
    by_layer.set_xlabel("layer with spans, the first one nearest to the text")
    by_layer.set_ylabel("mean span of the layer in tokens")
    for axis in (all_heads, by_layer):
        grid(axis)
    all_heads.legend(fontsize=8, frameon=False, loc="lower right")
    return save_figure(figure, path, DPI)
