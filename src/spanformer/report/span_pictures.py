"""Pictures of learned spans: their last values, and their history."""

from __future__ import annotations

import numpy as np

from spanformer.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    RED,
    Picture,
    frame,
    grid,
    label_ends,
    small_print,
    span_axis,
    span_ticks,
    subplots,
    whole_steps,
)
from spanformer.report.events import Run
from spanformer.report.measures import looks_back, tokens

COLUMNS = 700  # most steps that a picture can show
WHERE = {"lm": (" back", ""), "encoder": ("", " to either side")}
"""where heads look, before and after a number of tokens; an encoder–decoder's do both"""


def heads_picture(run: Run) -> Picture | None:
    """The paper's Figure 4: every head's span now, by layer."""
    if not run.steps:
        return None
    last, limit = run.steps[-1], run.start.shape.max_span
    looks, learned = looks_back(last), ~np.isnan(last.spans)
    layers, heads = looks.shape
    figure, ((axis,),) = subplots(1, 1, width=min(14.0, max(7.5, 2.6 + 0.62 * layers)), height=4.9)
    place = np.arange(layers)[:, None] + 1 + np.linspace(-0.3, 0.3, heads) * (heads > 1)
    axis.vlines(place.ravel(), looks.ravel(), last.reach.ravel(), color=GREEN, alpha=0.3, linewidth=2.0)
    for some, filled in ((learned, True), (~learned, False)):
        axis.scatter(place[some], looks[some], s=34, color=GREEN if filled else "white", edgecolor=GREEN, zorder=3,
                     linewidth=1.0, alpha=0.9)  # fmt: skip
    means = looks.mean(axis=1)
    axis.plot(np.arange(layers) + 1, means, color=RED, linewidth=1.8, zorder=2, marker="_", markersize=16)
    axis.axhline(limit, color=GREY, linestyle="--", linewidth=1.0)
    span_axis(axis, max(limit, last.reach.max()))
    axis.set_xticks(np.arange(layers) + 1)
    axis.set_xlim(0.4, layers + 0.6)
    axis.set_xlabel("layer, the first one nearest to the text")
    axis.grid(True, axis="y", color="#e5e5e5", linewidth=0.8)
    axis.set_axisbelow(True)
    below = "One dot a head: its span. The bar above a dot is the ramp, up to the farthest token the head looks at."
    below += "" if learned.all() else " Hollow: no span is learned."
    where = WHERE.get(run.start.objective, ("", ""))
    title = f"How far each head looks{''.join(where)}, after step {last.step:,}"
    frame(figure, title, f"{below}\n{small_print(run)}", beside=0.95)
    edge = layers + 0.6
    label_ends(axis, [(edge, means[-1], "mean of layer", RED), (edge, limit, f"limit {limit:,}", GREY)])
    sentence = _heads_sentence(looks, limit, where, learned=bool(learned.any()))
    return Picture("spans-by-layer", "Spans by layer", sentence, figure)


def _heads_sentence(looks: np.ndarray, limit: int, where: tuple[str, str], *, learned: bool) -> str:
    back, sides = where
    if not learned:
        few, many = tokens(looks.min()), tokens(looks.max())
        return f"No head learns a span: each looks{back} {few if few == many else f'{few} to {many}'} tokens{sides}."
    longest = np.unravel_index(looks.argmax(), looks.shape)
    short = int((looks <= limit / 16).sum())
    return (
        f"{short} of {looks.size} heads look{back} no more than a sixteenth of the limit of {limit:,} tokens{sides}; "
        f"the farthest is head {longest[1] + 1} of layer {longest[0] + 1} with {tokens(looks.max())} tokens, "
        f"the average {tokens(looks.mean())}."
    )


def history_picture(run: Run) -> Picture | None:
    """All heads by layer against steps, their spans as colour."""
    if not _learned(run):
        return None
    from matplotlib.colors import SymLogNorm

    chosen = _thinned(run.steps)
    steps = np.array([row.step for row in chosen], dtype=np.float64)
    looks = np.stack([looks_back(row).ravel() for row in chosen], axis=1)
    layers, heads = run.start.shape.layers, run.start.shape.heads
    limit = max(run.start.shape.max_span, looks.max(), 2)
    figure, ((axis,),) = subplots(1, 1, width=9.5, height=min(14.0, max(3.6, 1.9 + 0.065 * layers * heads)))
    middle = (steps[1:] + steps[:-1]) / 2
    edges = np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])
    mesh = axis.pcolormesh(edges, np.arange(layers * heads + 1), looks, cmap="viridis", rasterized=True,
                           norm=SymLogNorm(linthresh=1, vmin=0, vmax=limit, base=2))  # fmt: skip
    for layer in range(1, layers):
        axis.axhline(layer * heads, color="white", linewidth=1.0)
    axis.set_yticks(np.arange(layers) * heads + heads / 2, [f"layer {layer + 1}" for layer in range(layers)])
    axis.tick_params(axis="y", length=0)
    axis.invert_yaxis()
    axis.spines[["left", "bottom"]].set_visible(False)
    whole_steps(axis)
    bar = figure.colorbar(mesh, ax=axis, pad=0.015, aspect=30)
    bar.set_ticks(span_ticks(limit), labels=[f"{tick:,}" for tick in span_ticks(limit)])
    bar.minorticks_off()
    bar.set_label("span (tokens)")
    bar.outline.set_visible(False)
    below = f"One row a head, {heads} in each layer, the first head on top."
    frame(figure, "Spans of all heads through training", f"{below}\n{small_print(run)}")
    change = looks[:, -1] - looks[:, 0]
    grown, shrunk = int((change > 1).sum()), int((change < -1).sum())
    sentence = f"From step {chosen[0].step:,} to {chosen[-1].step:,}, of {len(change)} heads {grown} grew by more than "
    sentence += f"a token, {shrunk} shrank and {len(change) - grown - shrunk} stayed."
    if grown + shrunk:
        at = int(np.abs(change).argmax())
        sentence = sentence[:-1] + (
            f"; the largest change is head {at % heads + 1} of layer {at // heads + 1}, from {tokens(looks[at, 0])} to "
            f"{tokens(looks[at, -1])} tokens."
        )
    return Picture("spans-history", "Spans through training", sentence, figure)


def trend_picture(run: Run) -> Picture | None:
    """Average, longest and executed span against steps."""
    if not _learned(run):
        return None
    chosen = _thinned(run.steps)
    steps = [row.step for row in chosen]
    looks = np.stack([looks_back(row) for row in chosen])
    lines = {
        "longest span": (looks.max(axis=(1, 2)), BLUE),
        "executed, mean": (np.array([row.reach.mean() for row in chosen]), RED),
        "average span": (looks.mean(axis=(1, 2)), GREEN),
    }
    limit = run.start.shape.max_span
    figure, ((axis,),) = subplots(1, 1, width=8.5, height=4.5)
    for values, colour in lines.values():
        axis.plot(steps, values, color=colour, linewidth=2.2)
    axis.axhline(limit, color=GREY, linestyle="--", linewidth=1.0)
    span_axis(axis, max(limit, *(values.max() for values, _ in lines.values())))
    whole_steps(axis)
    axis.set_xlim(right=steps[-1])
    grid(axis)
    below = "Executed: how many distances heads look at on average, their ramps included; this is what is paid for."
    frame(figure, "Average, longest and executed span", f"{below}\n{small_print(run)}", beside=1.75)
    ends = [(steps[-1], values[-1], f"{name} {tokens(values[-1])}", colour) for name, (values, colour) in lines.items()]
    label_ends(axis, [*ends, (steps[-1], limit, f"limit {limit:,}", GREY)])
    longest, executed, average = (values for values, _ in lines.values())
    sentence = (
        f"The average span went from {tokens(average[0])} to {tokens(average[-1])} tokens, the longest from "
        f"{tokens(longest[0])} to {tokens(longest[-1])}; with their ramps heads now look at {tokens(executed[-1])} "
        f"tokens on average, of {limit:,} allowed."
    )
    return Picture("spans-trend", "Average, longest and executed span", sentence, figure)


def _learned(run: Run) -> bool:
    """Whether any head learns a span, over at least two steps."""
    return len(run.steps) > 1 and not np.isnan(run.steps[-1].spans).all()


def _thinned(rows: list) -> list:
    """At most COLUMNS of the rows, the first and the last among them."""
    at = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), COLUMNS)).round().astype(int))
    return [rows[i] for i in at]
