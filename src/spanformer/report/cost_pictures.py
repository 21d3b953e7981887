"""What the learned spans cost beside full attention: predicted by arithmetic, and measured."""

from __future__ import annotations

import numpy as np

from spanformer.cost.model import StepCost
from spanformer.report.drawing import GREEN, GREY, INK, Picture, frame, small_print, subplots
from spanformer.report.events import Run
from spanformer.report.measures import amount, lasting, percent, predicted, share, size

PARTS = {
    "attention": ("attention", "#0b6e4f"),
    "reprojection": ("memory projected again", "#52b788"),
    "persistent": ("persistent vectors", "#8d5a97"),
    "projections": ("projections", "#3f88c5"),
    "feedforward": ("feed-forward", "#a9c9e8"),
    "output": ("output", "#c9c9c9"),
}
MEASURED = (
    ("flops", "FLOPs counted in a step", amount),
    ("step_seconds", "Time of a step", lasting),
    ("attention_seconds", "Time in attention", lasting),
    ("peak_bytes", "Peak memory", size),
)


def cost_picture(run: Run) -> Picture | None:
    """Predicted operations by part above, what was measured below, where it is known; learned spans, or whatever a run
    has in their place, beside full attention."""
    costs, measured = predicted(run), latest(run)
    panels = [(title, show, measured[key]) for key, title, show in MEASURED if key in measured]
    if not run.steps or (costs is None and not panels):
        return None
    lines, learns = (costs is not None) + bool(panels), not np.isnan(run.steps[-1].spans).all()
    figure, axes = subplots(lines, 1, width=11.5, height=5.3 if lines == 2 else 3.4 if costs else 2.7)
    if panels:
        below = axes[-1, 0].get_subplotspec().subgridspec(1, len(panels), wspace=0.28)
        axes[-1, 0].remove()
        for at, panel in enumerate(panels):
            _measured(figure.add_subplot(below[at]), *panel, "learned" if learns else "its own")
    note = "Measured: the same batch with either." if panels else "Nothing was measured in this run."
    if costs is not None:
        _predicted(axes[0, 0], *costs, "learned spans" if learns else "its own")
        told = "Predicted: operations of one training step with its memory filled, a multiply and its add as two."
        note = f"{told} {note}"
    title = f"What {'the learned spans cost' if learns else 'its attention costs'} beside full attention"
    frame(figure, f"{title}, after step {run.steps[-1].step:,}", f"{note}\n{small_print(run)}")
    return Picture("cost", "Cost beside full attention", _sentence(costs, measured), figure)


def latest(run: Run) -> dict[str, dict[str, float]]:
    """What was measured last, of each quantity that was measured at all."""
    found = {}
    for row in run.costs:
        found |= {key: getattr(row, key) for key, *_ in MEASURED if getattr(row, key)}
    return found


def _predicted(axis, learned: StepCost, whole: StepCost, name: str) -> None:
    for at, cost in ((1, whole), (0, learned)):
        left = 0.0
        for part, value in cost.parts().items():
            axis.barh(at, float(value), left=left, height=0.62, color=PARTS[part][1], edgecolor="white", linewidth=0.8)
            left += value
        axis.annotate(f"{amount(cost.total)}FLOP", (left, at), xytext=(5, 0), textcoords="offset points", va="center",
                      fontsize=9, fontweight="bold")  # fmt: skip
    ratio = share(learned.by_span, whole.by_span)
    axis.set_title(
        f"Predicted: attention costs {percent(ratio)} of full attention, the whole step "
        f"{percent(share(learned.total, whole.total))}", loc="left", fontsize=10,
    )  # fmt: skip
    axis.set_yticks([0, 1], [name, "full attention"])
    axis.set_xlim(0, max(whole.total, learned.total) * 1.14)
    axis.set_xticks([])
    axis.spines[["bottom", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    _key(axis, [part for part in whole.parts() if getattr(whole, part)])


def _key(axis, names: list[str]) -> None:
    """The parts' names in their colours, in the order of the bars, in one line under them."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    words = []
    for label, colour in (PARTS[name] for name in names):
        square = TextArea("■", textprops={"color": colour, "fontsize": 11})
        words.append(
            HPacker(children=[square, TextArea(label, textprops={"fontsize": 9})], align="center", pad=0, sep=4)
        )
    line = HPacker(children=words, align="center", pad=0, sep=16)
    axis.add_artist(AnchoredOffsetbox(loc="upper left", child=line, frameon=False, pad=0, borderpad=0,
                                      bbox_to_anchor=(0, -0.01), bbox_transform=axis.transAxes))  # fmt: skip


def _measured(axis, title: str, show, values: dict[str, float], name: str) -> None:
    learned, whole = values["learned"], values["full"]
    for at, value, colour in ((1, whole, GREY), (0, learned, GREEN)):
        axis.barh(at, value, height=0.62, color=colour)
        axis.annotate(show(value), (value, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    axis.set_title(f"{title}\n{_ratio(learned, whole)}", loc="left", fontsize=10, color=INK)
    axis.set_yticks([0, 1], [name, "full"])
    axis.set_xlim(0, max(learned, whole, 1e-12) * 1.5)
    axis.set_xticks([])
    axis.spines[["bottom", "top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def _ratio(learned: float, whole: float) -> str:
    """Full attention against learned spans, as one would say it."""
    if learned <= 0 or whole <= 0:
        return "no ratio"
    times = f"{max(whole / learned, learned / whole):.3g}"
    return "the same" if times == "1" else f"{times}× {'less' if whole > learned else 'more'}"


def _sentence(costs: tuple[StepCost, StepCost] | None, measured: dict[str, dict[str, float]]) -> str:
    words = {
        "flops": "counted operations",
        "attention_seconds": "time in attention",
        "step_seconds": "time of a step",
        "peak_bytes": "peak memory",
    }
    found = [f"{words[key]} {_ratio(values['learned'], values['full'])}" for key, values in measured.items()]
    if costs is None:
        return f"Beside full attention, measured: {', '.join(found)}."
    learned, whole = costs
    said = (
        f"By arithmetic attention needs {percent(share(learned.by_span, whole.by_span))} of what full attention would "
        f"({amount(learned.by_span)}FLOP a step against {amount(whole.by_span)}FLOP)"
    )
    return f"{said}; measured: {', '.join(found)}." if found else f"{said}; nothing was measured in this run."
