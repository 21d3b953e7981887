"""Right answers over rate and price of facts: a panel for each kind of heads, a cell for each arm."""

from __future__ import annotations

from pathlib import Path

from spanformer.report.drawing import DPI, plain, save_figure, subplots


def draw_rare(maps: dict[str, dict], path: Path) -> Path:
    """maps: {kind: {"learned": share, "arms": {"RATE PENALTY": {"right": share}}}}."""
    arms = [tuple(arm.split()) for found in maps.values() for arm in found["arms"]]
    rates = sorted({rate for rate, _ in arms}, key=int)
    prices = sorted({price for _, price in arms}, key=float)
    wide = max(1.9, 0.62 * len(rates))
    figure, (axes,) = subplots(1, len(maps), width=wide * len(maps) + 1.2, height=0.55 * len(prices) + 1.9, sharey=True)
    figure.set_layout_engine("constrained")
    for axis, (kind, found) in zip(axes, maps.items(), strict=True):
        values = [[found["arms"].get(f"{rate} {price}", {}).get("right") for rate in rates] for price in prices]
        shown = [[float("nan") if value is None else 100 * value for value in row] for row in values]
        axis.imshow(shown, cmap="YlGn", vmin=0, vmax=100, aspect="auto", origin="lower")
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                dark = value is not None and value > 0.6
                text = "–" if value is None else f"{100 * value:.0f}"
                axis.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
        axis.set_title(f"{plain(kind)}\nlearned: {100 * found['learned']:.0f} %", fontsize=9)
        axis.set_xticks(range(len(rates)), [f"{int(rate):,}" for rate in rates], rotation=45, fontsize=8)
        axis.set_yticks(range(len(prices)), prices, fontsize=8)
    axes[0].set_ylabel("price of a token of span")
    figure.supxlabel("tokens for each answer in the second training; cells: answers still right, %", fontsize=9)
    return save_figure(figure, path, DPI)
