"""Loss against key/value memory on prose and on code; solid: fitted to text of that kind, dashed: of the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spanformer.report.drawing import subplots


def draw_memory(measured: dict[str, dict], divisors: Sequence[int], path: Path) -> Path:
    """measured: {domain: {"full": bits, "learned, prose /3": {"share": …, "rise": …}, …}}."""
    colours = {
        "uniform": "C7",
        "local/global 5:1": "C4",
        "attention mass": "C1",
        "survey only": "C0",
        "learned": "C2",
    }
    figure, (axes,) = subplots(1, 2, width=10, height=4.2, sharey=True)
    figure.set_layout_engine("constrained")
    for axis, domain in zip(axes, measured, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for place, row in measured[domain].items():
            if place != "full":
                lines.setdefault(place.rsplit(" /", 1)[0], []).append((row["share"], 100 * row["rise"]))
        for name, points in sorted(lines.items()):
            method, _, source = name.partition(", ")
            style = "--" if source not in ("", domain) else "-"
            label = f"{method}, from {'this' if style == '-' else 'the other'} kind of text" if source else method
            axis.plot(*zip(*sorted(points), strict=True), "o" + style, color=colours[method], label=label, ms=4)
        axis.set_title(f"measured on {domain}")
        axis.set_xscale("log", base=2)
        axis.set_xticks([1 / d for d in divisors], [f"1/{d}" for d in divisors])
        axis.set_xlabel("key/value memory kept")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("rise of bits per byte over full attention, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)
    return path
