"""The lost-in-the-middle curve: how well a model retrieves a fact, by its depth in the text."""

from __future__ import annotations

import math

from spanformer.report.drawing import CYCLE, Picture, frame, grid, plain, subplots

TASKS = {"key": "a pass key in filler", "pair": "one box of many"}


def depth_picture(found: dict[str, list[dict]]) -> Picture:
    """found: by the name of a model, rows of context, depth, find and nats, as `spanformer probe --save` writes
    them."""
    rows = [row for each in found.values() for row in each]
    contexts = sorted({row["context"] for row in rows})
    finds = sorted({row["find"] for row in rows})
    figure, axes = subplots(len(finds), len(contexts), width=3.6 * len(contexts) + 0.6, height=2.7 * len(finds) + 1.0,
                            sharex=True, sharey=True)  # fmt: skip
    for line, find in zip(axes, finds, strict=True):
        line[0].set_ylabel(f"{TASKS[find]}\nprobability of a token")
        for axis, context in zip(line, contexts, strict=True):
            for n, (name, each) in enumerate(found.items()):
                at = sorted(
                    (r["depth"], math.exp(-r["nats"])) for r in each if (r["find"], r["context"]) == (find, context)
                )
                axis.plot(*zip(*at, strict=True), color=CYCLE[n % len(CYCLE)], marker="o", label=plain(name, 40))
            axis.set_title(f"{context:,} tokens", fontsize=9, loc="left")
            axis.set_ylim(-0.03, 1.03)
            grid(axis)
    for axis in axes[-1]:
        axis.set_xlabel("depth: 0 the beginning, 1 just before the question")
    axes[0, 0].legend(fontsize=8, frameon=False)
    frame(figure, "Recall by depth", "Geometric mean over the answer's tokens; tasks are the same for all.")
    return Picture("probe", "Recall by depth", "Probability of the answer, by the depth of the fact.", figure)
