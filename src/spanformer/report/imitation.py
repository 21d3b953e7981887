"""The report of runs that learn from recorded episodes: losses, learned spans, returns asked against returns got."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spanformer.core.files import write_text
from spanformer.report import html
from spanformer.report.drawing import GREY, Picture, colours, frame, grid, label_ends, plain, subplots
from spanformer.report.imitation_rows import (
    ImitationArm,
    ImitationRows,
    imitation_arms,
    is_imitation,
    read_imitation,
)

RESULTS = "runs.json"
__all__ = ["ImitationArm", "ImitationRows", "asked_picture", "is_imitation", "read_imitation", "write_imitation_report"]


def loss_picture(runs: Sequence[ImitationRows]) -> Picture | None:
    """Losses, and average learned spans, against steps."""
    panels = [("loss", "loss of an action"), ("span_average", "average span (tokens)")]
    panels = [
        (key, name) for key, name in panels if any(r.record.get(key) is not None for run in runs for r in run.steps)
    ]
    if not panels:
        return None
    figure, (axes,) = subplots(1, len(panels), width=5.2 * len(panels) + 1, height=4.0)
    for axis, (key, name) in zip(axes, panels, strict=True):
        axis.ends = []
        for run, colour in zip(runs, colours(len(runs)), strict=True):
            rows = [row for row in run.steps if row.record.get(key) is not None]
            if rows:
                steps, values = [row.whole("step") for row in rows], [row.number(key) for row in rows]
                axis.plot(steps, values, color=colour, linewidth=1.8)
                axis.ends.append((steps[-1], values[-1], plain(run.name, 22), colour))
        axis.set_xlabel("optimiser steps")
        axis.set_ylabel(name)
        grid(axis)
    below = "Cross-entropy in nats, or the squared error of continuous actions."
    frame(figure, f"Learning from recorded episodes: {plain(runs[0].env)}", below, beside=1.4)
    for axis in axes:
        label_ends(axis, axis.ends)
    return Picture("losses", "Losses", "The loss of the recorded actions, by optimiser steps.", figure)


def asked_picture(arms: Sequence[ImitationArm], env: str, data: tuple[float, float]) -> Picture | None:
    """Mean return got against return asked for; data: the smallest and largest return of the recorded episodes."""
    asked = [arm for arm in arms if any(not math.isnan(one.target) for one in arm.got())]
    if not asked:
        return None
    figure, ((axis,),) = subplots(1, 1, width=7.2, height=4.6)
    ends, every = [], []
    for arm, colour in zip(arms, colours(len(arms)), strict=True):
        got = arm.got()
        if arm not in asked:  # asked for nothing: a level
            for one in got:
                axis.axhline(one.mean, color=colour, linewidth=1.4, linestyle="-.")
                ends.append((math.nan, one.mean, plain(arm.name, 24), colour))
            continue
        x, y, spread = (np.array(each) for each in zip(*((g.target, g.mean, g.deviation) for g in got), strict=True))
        every += x.tolist()
        axis.errorbar(
            x, y, yerr=spread, color=colour, marker="o", markersize=4, linewidth=1.8, elinewidth=0.8, capsize=2
        )
        if len(arm.runs) > 1:
            axis.fill_between(x, [min(g.each) for g in got], [max(g.each) for g in got], color=colour, alpha=0.2,
                              linewidth=0)  # fmt: skip
        ends.append((x[-1], y[-1], plain(arm.name, 24), colour))
    line = [min(every), max(every)]
    axis.plot(line, line, color=GREY, linewidth=1.0, linestyle="--", zorder=1)
    axis.axvspan(*data, color=GREY, alpha=0.12, linewidth=0)
    margin = 0.05 * (line[1] - line[0]) or 1.0
    axis.set_xlim(line[0] - margin, line[1] + margin)
    axis.set_xlabel("return asked for")
    axis.set_ylabel("return got")
    grid(axis)
    seeds = max(len(arm.runs) for arm in arms)
    band = f" Lines: means of {seeds} runs with other seeds; band: lowest to highest." * (seeds > 1)
    below = (
        "Bars: standard deviation over episodes. Dashed: what was asked. Grey: the returns of the data."
        f"{chr(10) * bool(band)}{band.strip()}"
    )
    frame(figure, f"Return asked against return got: {plain(env)}", below, beside=1.9)
    label_ends(axis, [(line[1] if math.isnan(x) else x, *more) for x, *more in ends])
    return Picture("asked", "Return asked against return got", "Mean returns of episodes by the return asked for.",
                   figure)  # fmt: skip


def said(run: ImitationRows) -> str:
    """One sentence about a run."""
    text = f"{run.name}: {run.env}, {run.parameters:,} parameters"
    for e in run.asked:
        right = "" if math.isnan(e.success) else f", {100 * e.success:.1f} % right"
        what = "" if math.isnan(e.target) else f"asked {e.target:.3f}, "
        text += f"; {what}got {e.episode_return:.3f}{right}"
    return text


def said_of_arm(arm: ImitationArm) -> str:
    """One sentence about the runs of an arm."""
    rank = arm.rank_correlation()
    text = f"{arm.name}, {len(arm.runs)} run{'s' * (len(arm.runs) > 1)}"
    for one in arm.got():
        what = "" if math.isnan(one.target) else f"asked {one.target:g}, "
        text += f"; {what}got {one.mean:.3f}"
    return text + ("" if math.isnan(rank) else f"; rank correlation of asked and got {rank:.3f}")


def figures_of(arm: ImitationArm, scores: tuple[float, float] | None) -> dict:
    """The figures of an arm. scores: the mean returns of random actions and an expert, 0 and 100 normalised points."""
    asked = []
    for one in arm.got():
        row: dict[str, object] = {} if math.isnan(one.target) else {"target": one.target}
        row |= {"got": one.mean, "each": one.each, "deviation": one.deviation}
        if not any(math.isnan(share) for share in one.success):
            row["success"] = one.success
        if scores is not None:
            row["points"] = [round(100 * (got - scores[0]) / (scores[1] - scores[0]), 2) for got in one.each]
        asked.append(row)
    spans = [run.steps[-1].record.get("span_average") for run in arm.runs if run.steps]
    seeds = [run.config.get("imitate", {}).get("seed") for run in arm.runs]
    found: dict[str, object] = {"arm": arm.name, "env": arm.runs[0].env, "parameters": arm.runs[0].parameters,
                                "runs": [run.name for run in arm.runs], "seeds": seeds, "asked": asked}  # fmt: skip
    if not math.isnan(arm.rank_correlation()):
        found["rank_correlation"] = arm.rank_correlation()
    return found | ({"span_average": spans} if any(each is not None for each in spans) else {})


def write_imitation_report(paths: Sequence[Path], out: Path, scores: tuple[float, float] | None = None) -> Path:
    """Draw the pictures, write report.html and the figures of all arms into `out`; returns the page's path. scores: see
    `figures_of`."""
    runs = [read_imitation(path) for path in paths]
    arms = imitation_arms(runs)
    out.mkdir(parents=True, exist_ok=True)
    body = [html.heading(1, "Learning from recorded episodes")]
    body += [html.paragraph(said(run)) for run in runs]
    body += [html.paragraph(said_of_arm(arm)) for arm in arms]
    lowest, highest = min(run.returns[0] for run in runs), max(run.returns[1] for run in runs)
    for picture in (loss_picture(runs), asked_picture(arms, runs[0].env, (lowest, highest))):
        if picture is not None:
            body.append(html.picture(picture.title, picture.sentence, picture.save(out / f"{picture.name}.png")))
    for run in runs:
        cells = [[section, json.dumps(values, ensure_ascii=False)] for section, values in run.config.items()]
        body.append(html.folded(f"Configuration of {run.name}", html.table(["section", "values"], cells, "long")))
    rows = [figures_of(arm, scores) for arm in arms]
    write_text(out / RESULTS, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    page = out / "report.html"
    write_text(page, html.page("Learning from recorded episodes", body).encode(errors="replace").decode())
    return page
