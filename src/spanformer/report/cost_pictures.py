"""The cost of learned spans against full attention: predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from spanformer.cost.model import StepCost
from spanformer.report.drawing import GREEN, GREY, INK, Picture, frame, small_print, subplots
from spanformer.report.events import Run
from spanformer.report.measures import (
    TIME_PARTS,
    amount,
    lasting,
    percent,
    predicted,
    said_parts,
    share,
    size,
    step_times,
)

PARTS = {
    "attention": ("attention", "#0b6e4f"),
    "reprojection": ("memory projected again", "#52b788"),
    "persistent": ("persistent vectors", "#8d5a97"),
    "projections": ("projections", "#3f88c5"),
    "feedforward": ("feed-forward", "#a9c9e8"),
    "output": ("output", "#c9c9c9"),
}
TIMES = {
    name: (label, colour)
    for (name, label), colour in zip(TIME_PARTS.items(), ("#0b6e4f", "#3f88c5", "#e08e1b", "#c9c9c9"), strict=True)
}
MEASURED = (
    ("flops", "FLOPs counted in a step", amount),
    ("attention_seconds", "Time in attention", lasting),
    ("peak_bytes", "Peak memory", size),
)


def cost_picture(run: Run) -> Picture | None:
    """Predicted operations by part above; below, the time of a step by part and other measurements, if
    known. Learned spans, or the run's attention, compared with full attention."""
    costs, times, measured = predicted(run), step_times(run), latest(run)
    panels = [(title, show, measured[key]) for key, title, show in MEASURED if key in measured]
    heights = [2.15] * (costs is not None) + [2.15] * (times is not None) + [2.0] * bool(panels)
    if not run.steps or not heights:
        return None
    learns = not np.isnan(run.steps[-1].spans).all()
    figure, axes = subplots(len(heights), 1, width=11.5, height=1.0 + sum(heights))
    lines = [axis for (axis,) in axes]
    if panels:
        below = lines[-1].get_subplotspec().subgridspec(1, len(panels), wspace=0.28)
        lines.pop().remove()
        for at, panel in enumerate(panels):
            _measured(figure.add_subplot(below[at]), *panel, "learned" if learns else "its own")
    name = "learned spans" if learns else "its own"
    notes = ["Measured: the same batch with either." if panels or times else "Nothing was measured in this run."]
    if times is not None:
        _timed(lines.pop(), times, name)
    if costs is not None:
        _predicted(lines.pop(), *costs, name)
        caption = "Predicted: operations of one training step with its memory filled, a multiply and its add as two."
        notes.insert(0, caption)
    title = f"What {'the learned spans cost' if learns else 'its attention costs'} beside full attention"
    frame(figure, f"{title}, after step {run.steps[-1].step:,}", f"{' '.join(notes)}\n{small_print(run)}")
    return Picture("cost", "Cost beside full attention", _sentence(costs, times, measured), figure)


def latest(run: Run) -> dict[str, dict[str, float]]:
    """The last measurement of each quantity."""
    found = {}
    for row in run.costs:
        found |= {key: getattr(row, key) for key, *_ in MEASURED if getattr(row, key)}
    return found


def _predicted(axis, learned: StepCost, whole: StepCost, name: str) -> None:
    bars = {name: learned.parts(), "full attention": whole.parts()}
    _stacked(axis, bars, PARTS, lambda total: f"{amount(total)}FLOP")
    ratio = share(learned.by_span, whole.by_span)
    axis.set_title(
        f"Predicted: attention costs {percent(ratio)} of full attention, the whole step "
        f"{percent(share(learned.total, whole.total))}", loc="left", fontsize=10,
    )  # fmt: skip


def _timed(axis, times: dict[str, dict[str, float]], name: str) -> None:
    _stacked(axis, {name: times["learned"], "full attention": times["full"]}, TIMES, lasting)
    ratio = _ratio(*(sum(times[which].values()) for which in ("learned", "full")))
    axis.set_title(
        f"Measured: time of a step {ratio}, of which {said_parts(times['learned'])}", loc="left", fontsize=10
    )


def _stacked(axis, bars: Mapping[str, Mapping[str, float]], key: dict[str, tuple[str, str]], show) -> None:
    """Horizontal bars made of parts, the first one lowest, each with its total beside it; key: a part's name and its
    colour."""
    for at, parts in reversed(list(enumerate(bars.values()))):
        left = 0.0
        for part, value in parts.items():
            axis.barh(at, float(value), left=left, height=0.62, color=key[part][1], edgecolor="white", linewidth=0.8)
            left += value
        axis.annotate(show(left), (left, at), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
                      fontweight="bold")  # fmt: skip
    axis.set_yticks(range(len(bars)), list(bars))
    axis.set_xlim(0, max(sum(parts.values()) for parts in bars.values()) * 1.14)
    axis.set_xticks([])
    axis.spines[["bottom", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    _key(axis, [key[part] for part in key if any(parts.get(part) for parts in bars.values())])


def _key(axis, parts: list[tuple[str, str]]) -> None:
    """A legend of one line under the bars, in their order."""
    from matplotlib.offsetbox import AnchoredOffsetbox, HPacker, TextArea

    words = []
    for label, colour in parts:
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
    """The ratio of full attention to learned spans, in words."""
    if learned <= 0 or whole <= 0:
        return "no ratio"
    times = f"{max(whole / learned, learned / whole):.3g}"
    return "the same" if times == "1" else f"{times}× {'less' if whole > learned else 'more'}"


def _sentence(
    costs: tuple[StepCost, StepCost] | None, times: dict | None, measured: dict[str, dict[str, float]]
) -> str:
    words = {"flops": "counted operations", "attention_seconds": "time in attention", "peak_bytes": "peak memory"}
    found = [f"{words[key]} {_ratio(values['learned'], values['full'])}" for key, values in measured.items()]
    if times is not None:
        found.append(f"time of a step {_ratio(*(sum(times[which].values()) for which in ('learned', 'full')))}")
    if costs is None:
        return f"Beside full attention, measured: {', '.join(found)}."
    learned, whole = costs
    said = (
        f"By arithmetic attention needs {percent(share(learned.by_span, whole.by_span))} of what full attention would "
        f"({amount(learned.by_span)}FLOP a step against {amount(whole.by_span)}FLOP)"
    )
    return f"{said}; measured: {', '.join(found)}." if found else f"{said}; nothing was measured in this run."
