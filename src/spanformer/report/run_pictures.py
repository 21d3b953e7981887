"""Pictures of one training run, from its event file; each has a sentence that describes it."""

from __future__ import annotations

import numpy as np

from spanformer.report.budget_picture import budget_picture
from spanformer.report.cost_pictures import cost_picture
from spanformer.report.depth_pictures import depth_picture
from spanformer.report.drawing import (
    BLUE,
    GREEN,
    RED,
    Picture,
    bits_axis,
    frame,
    grid,
    label_ends,
    small_print,
    subplots,
    time_unit,
    whole_steps,
)
from spanformer.report.dynamic_pictures import dynamic_picture
from spanformer.report.events import Run
from spanformer.report.measures import evaluated, lasting, smooth, training
from spanformer.report.span_pictures import heads_picture, history_picture, trend_picture


def run_pictures(run: Run) -> list[Picture]:
    """Every picture this run's rows allow."""
    drawers = (
        loss_picture,
        heads_picture,
        history_picture,
        trend_picture,
        budget_picture,
        cost_picture,
        dynamic_picture,
        depth_picture,
    )
    return [picture for draw in drawers if (picture := draw(run)) is not None]


def loss_picture(run: Run) -> Picture | None:
    """Bits per unit against steps and against training time: training faint and smoothed, validation, test."""
    train, valid, test = training(run), evaluated(run, "valid"), evaluated(run, "test")
    if not len(train.bits) and not len(valid.bits):
        return None
    unit = run.start.bits_unit
    smoothed, window = smooth(train.bits)
    longest = max([0.0, *train.seconds, *valid.seconds, *test.seconds])
    second, seconds_name = time_unit(longest)
    figure, ((by_step, by_time),) = subplots(1, 2, width=11.5, height=4.6, sharey=True)
    for axis, x_of in ((by_step, lambda curve: curve.steps), (by_time, lambda curve: curve.seconds / second)):
        ends = []
        if len(train.bits):
            axis.plot(x_of(train), train.bits, color=BLUE, alpha=0.25, linewidth=0.8)
            axis.plot(x_of(train), smoothed, color=BLUE, linewidth=1.8)
            ends.append((smoothed[-1], "training", BLUE))
        if len(valid.bits):
            axis.plot(x_of(valid), valid.bits, color=GREEN, linewidth=2.2, marker="o", markersize=4, clip_on=False)
            ends.append((valid.bits[-1], f"validation {valid.bits[-1]:.3f}", GREEN))
        if len(test.bits):
            axis.plot(x_of(test)[-1:], test.bits[-1:], color=RED, marker="D", markersize=6, linestyle="none",
                      clip_on=False)  # fmt: skip
            ends.append((test.bits[-1], f"test {test.bits[-1]:.3f}", RED))
        last = max(max(x_of(curve), default=0) for curve in (train, valid, test))
        axis.set_xlim(right=last)
        axis.ends = [(last, *end) for end in ends]
        grid(axis)
        axis.tick_params(labelleft=True)
    whole_steps(by_step)
    by_time.set_xlabel(f"training time ({seconds_name})")
    bits_axis(by_step, unit, np.concatenate([train.bits, valid.bits, test.bits]))
    note = f"Training: each recorded batch faintly, their running mean over {window} rows on top." if window > 1 else ""
    below = "\n".join(filter(None, [note, small_print(run)]))
    frame(figure, f"Bits per {unit} through training", below, beside=1.25)
    for axis in (by_step, by_time):
        label_ends(axis, axis.ends)
    return Picture("loss", "Quality through training", _loss_sentence(run), figure)


def _loss_sentence(run: Run) -> str:
    train, valid = training(run), evaluated(run, "valid")
    unit = run.start.bits_unit
    if not len(valid.bits):
        smoothed = smooth(train.bits)[0]
        return (
            f"Training went from {smoothed[0]:.3f} to {smoothed[-1]:.3f} bits per {unit} "
            f"in {lasting(train.seconds[-1])}; this run was never validated."
        )
    best, last = int(valid.bits.argmin()), len(valid.bits) - 1
    said = (
        f"Validation went from {valid.bits[0]:.3f} to {valid.bits[last]:.3f} bits per {unit} "
        f"in {lasting(valid.seconds[last])}"
    )
    if best < last:
        said += f"; it was best, {valid.bits[best]:.3f}, at step {valid.steps[best]:,.0f}"
    elif last > 0:
        said += ", its best so far: it was still falling when last evaluated"
    if len(train.bits) and (gap := valid.bits[last] - smooth(train.bits)[0][-1]) > 0.02:
        said += f", and lies {gap:.2f} above training"
    return said + "."
