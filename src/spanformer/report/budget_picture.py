"""A run with a budget: the share of full attention's cost against its target, and the price of a token."""

from __future__ import annotations

import math

import numpy as np

from spanformer.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    Picture,
    frame,
    grid,
    label_ends,
    small_print,
    subplots,
    whole_steps,
)
from spanformer.report.events import Run


def budget_picture(run: Run) -> Picture | None:
    """None: a run without a budget, or of fewer than two rows."""
    rows = [row for row in run.steps if math.isfinite(row.attention_share) and row.budget > 0]
    if len(rows) < 2:
        return None
    target = rows[-1].budget
    steps = np.array([row.step for row in rows])
    shares, prices = (np.array([getattr(row, name) for row in rows]) for name in ("attention_share", "price"))
    figure, ((left, right),) = subplots(1, 2, width=11.5, height=4.2)
    left.plot(steps, [100 * row.budget for row in rows], color=GREY, linestyle="--", linewidth=1.0)
    left.plot(steps, 100 * shares, color=GREEN, linewidth=2.0)
    left.set_ylim(0, 110 * max(target, shares.max()))
    left.set_ylabel("% of full attention's distances")
    right.plot(steps, prices, color=BLUE, linewidth=2.0)
    right.set_ylim(bottom=0)
    right.set_ylabel("price of a token (nats)")
    for axis in (left, right):
        whole_steps(axis)
        axis.set_xlim(right=steps[-1])
        grid(axis)
    limit = run.start.shape.max_span
    frame(figure, f"Cost of attention, held at {target:.3g} of full attention",
          f"Full attention computes {limit:,} distances a head.\n{small_print(run)}", beside=1.3)  # fmt: skip
    label_ends(left, [(steps[-1], 100 * shares[-1], f"heads {shares[-1]:.2%}", GREEN),
                      (steps[-1], 100 * target, f"budget {target:.2%}", GREY)])  # fmt: skip
    sentence = (
        f"At the end attention computes {shares[-1]:.2%} of the distances of full attention to {limit:,} tokens, "
        f"{shares[-1] / target - 1:+.1%} off its budget of {target:.2%}; a token more in the average window is worth "
        f"{prices[-1]:.1e} nats."
    )
    return Picture("budget", "Cost of attention against its budget", sentence, figure)
