"""Pictures of policies: learning curves of arms with their seeds, learned spans by layer, attention along an episode.

Shapes: T steps of an episode, H heads.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spanformer.report.drawing import Picture, colours, frame, grid, plain, subplots
from spanformer.report.policy_rows import SMOOTHED, Arm

BESIDE = 2.7
"""inches for the names of arms"""
PANELS = (
    ("success", "share of episodes that end well"),
    ("episode_return", "return of an episode"),
    ("span_average", "average span (steps)"),
)
TASKS = {
    "t_maze": "The cue is shown at step 0 only; the turn is the last step.",
    "memory_chain": "The bit is shown at step 0 only; it is asked for at the last step.",
}


@dataclass(frozen=True)
class EpisodeMaps:
    """One episode of a policy, for its picture."""

    name: str
    env: str
    maps: list[np.ndarray]
    """[layers] of [H, T, T]: the weight of step j for the decision at step i"""
    episode_return: float
    success: float


def curve_picture(arms: Sequence[Arm]) -> Picture | None:
    """Against environment steps: a line for the mean of an arm's runs, and their range."""
    panels = [(key, name) for key, name in PANELS if any(len(run.curve(key)[0]) for arm in arms for run in arm.runs)]
    if not panels:
        return None
    figure, (axes,) = subplots(1, len(panels), width=4.4 * len(panels) + BESIDE, height=4.2)
    for axis, (key, name) in zip(axes, panels, strict=True):
        for arm, colour in zip(arms, colours(len(arms)), strict=True):
            steps, middle, low, high = arm.curve(key)
            if len(steps):
                axis.plot(steps / 1e3, middle, color=colour, linewidth=1.8)
                if len(arm.runs) > 1:
                    axis.fill_between(steps / 1e3, low, high, color=colour, alpha=0.18, linewidth=0)
        axis.set_xlabel("environment steps (thousands)")
        axis.set_ylabel(name)
        if key != "episode_return":
            axis.set_ylim(bottom=0)
        grid(axis)
    seeds = max(len(arm.runs) for arm in arms)
    band = f"Lines are means of up to {seeds} runs with other seeds, shaded from the lowest to the highest. " * (
        seeds > 1
    )
    gap = "\n" if len(panels) == 1 else ""  # a narrow picture has two lines
    below = f"{band}{gap}Running means over {SMOOTHED} updates; actions are drawn at random while training."
    frame(figure, f"Learning curves: {plain(task_of(arms))}", below)
    figure.subplots_adjust(right=1 - BESIDE / figure.get_size_inches()[0])
    names = [textwrap.fill(plain(arm.name, 90), 28) for arm in arms]
    lines = [axes[0].plot([], [], color=colour, linewidth=3)[0] for colour in colours(len(arms))]
    figure.legend(lines, names, loc="center right", frameon=False, fontsize=9, labelspacing=1.0)
    return Picture("curves", "Learning curves", "Episodes through training, by environment steps.", figure)


def task_of(arms: Sequence[Arm]) -> str:
    """The environments of all arms, each with its length if it has one."""
    return ", ".join(dict.fromkeys(run.task for arm in arms for run in arm.runs))


def span_picture(arms: Sequence[Arm]) -> Picture | None:
    """A dot for each head of each run: its span at the end of training, by layer."""
    learned = [(arm, colour) for arm, colour in zip(arms, colours(len(arms)), strict=True) if arm.spans()]
    if not learned:
        return None
    figure, ((axis,),) = subplots(1, 1, width=7.2, height=4.2)
    layers = max(len(spans) for arm, _ in learned for spans in arm.spans())
    for place, (arm, colour) in enumerate(learned):
        shift = (place - (len(learned) - 1) / 2) * 0.22
        for spans in arm.spans():
            at = [  # heads side by side, so that equal spans do not hide each other
                (n + 1 + shift + 0.05 * (head - (len(layer) - 1) / 2), span)
                for n, layer in enumerate(spans)
                for head, span in enumerate(layer)
                if span is not None
            ]
            x, y = zip(*at, strict=True)
            axis.plot(x, y, "o", color=colour, markersize=7, alpha=0.55, markeredgewidth=0)
        axis.plot([], [], "o", color=colour, label=plain(arm.name, 40))
    lengths = {run.length for arm, _ in learned for run in arm.runs if run.length}
    for length in sorted(lengths):
        axis.axhline(length, color="#222222", linewidth=1, linestyle="--")
        axis.annotate(f"the cue is {length} steps back when it is needed", (0.45, length), xytext=(0, 4),
                      textcoords="offset points", fontsize=8)  # fmt: skip
    axis.set_xticks(range(1, layers + 1), [f"layer {n}" for n in range(1, layers + 1)])
    axis.set_xlim(0.4, layers + 0.6)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("span of a head (steps)")
    grid(axis)
    if len(learned) > 1:
        axis.legend(frameon=False, fontsize=8)
    below = (
        "One dot for each head of each run, after training. A head sees its span with full weight, and\nless and less "
        "of the ramp beyond it."
    )
    frame(figure, f"Learned spans: {plain(task_of([arm for arm, _ in learned]))}", below)
    return Picture("spans", "Learned spans", "How far each head looks back after training, by layer.", figure)


def episode_picture(watched: EpisodeMaps) -> Picture:
    """One panel for each layer: for the decision of each step, the largest weight that any head gives to each step."""
    from matplotlib.colors import PowerNorm

    columns = min(4, len(watched.maps))
    lines = -(-len(watched.maps) // columns)
    figure, axes = subplots(lines, columns, width=4.3 * columns + 1.2, height=4.0 * lines + 0.9)
    image = None
    for n, axis in enumerate(axes.ravel()):
        if n >= len(watched.maps):
            axis.set_visible(False)
            continue
        weights = np.ma.masked_equal(np.triu(np.full(watched.maps[n].shape[1:], -1.0), 1), -1.0)
        shown = np.ma.array(watched.maps[n].max(0), mask=weights.mask)
        image = axis.imshow(shown, cmap="viridis", norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
        axis.set_title(f"layer {n + 1}", fontsize=10)
        axis.set_xlabel("step that is attended to")
        axis.set_ylabel("step that decides" if n % columns == 0 else "")
    end = "" if watched.success != watched.success else ", right" if watched.success else ", wrong"
    steps = watched.maps[0].shape[1]
    below = (
        f"{plain(watched.name)}: one episode of {steps} steps, return {watched.episode_return:.2f}{end}. Colour: the "
        f"largest attention weight of any head.\nA row is a decision; its bright cells are the steps that it read. "
        f"{TASKS.get(watched.env, '')}"
    )
    frame(figure, f"What the policy attends to: {plain(watched.env)}", below, beside=0.9)
    if image is not None:
        box = axes[0, columns - 1].get_position()
        bar = figure.add_axes((box.x1 + 0.015, box.y0, 0.012, box.height))
        figure.colorbar(image, cax=bar)
        bar.set_ylabel("attention weight", fontsize=8)
    return Picture(
        f"episode-{watched.env}", "Attention along an episode", "Which earlier steps each decision reads.", figure
    )
