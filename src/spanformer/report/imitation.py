"""The report of runs that learn from recorded episodes: losses, learned spans, returns asked against returns got."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanformer.core.events import FILE, ResumeEvent
from spanformer.core.files import write_text
from spanformer.core.policy_events import AskedEvent, ImitateEvent, ImitationStartEvent
from spanformer.report import html
from spanformer.report.drawing import GREY, Picture, colours, frame, grid, label_ends, plain, subplots
from spanformer.report.rows import Line


@dataclass(frozen=True)
class ImitationRows:
    """The rows of one run."""

    name: str
    env: str
    parameters: int
    config: dict
    returns: tuple[float, float]
    """smallest and largest of the data"""
    steps: list[Line]
    asked: list[AskedEvent]


def is_imitation(path: Path) -> bool:
    """Whether the first row of a run is that of learning from recorded episodes."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return False
    with open(file, encoding="utf-8") as stream:
        return f'"event": "{ImitationStartEvent.kind}"' in stream.readline()


def read_imitation(path: Path) -> ImitationRows:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not is_imitation(path):
        raise ValueError(f"{file} does not begin a run of `rl imitate`; expected the folder of one")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = [Line(json.loads(line), f"{file}, line {n}") for n, line in enumerate(lines, 1)]
    kept: dict[tuple, Line] = {}
    for row in rows[1:]:
        kind, step = row.text("event"), row.whole("step")
        if kind == ResumeEvent.kind:  # later rows are void: these steps are repeated
            kept = {key: old for key, old in kept.items() if key[1] <= step}
        key = (kind, step, row.record.get("target"))
        kept.pop(key, None)
        kept[key] = row
    first = rows[0]
    found = first.record.get("returns")
    if not isinstance(found, list) or len(found) != 3:
        raise first.refuse("returns", "three numbers")
    return ImitationRows(
        first.text("run"), first.text("env"), first.whole("parameters"), first.table("config"),
        (float(found[0]), float(found[-1])),
        [row for key, row in kept.items() if key[0] == ImitateEvent.kind],
        [asked(row) for key, row in kept.items() if key[0] == AskedEvent.kind],
    )  # fmt: skip


def asked(row: Line) -> AskedEvent:
    number = lambda key: row.number(key) if row.record.get(key) is not None else math.nan  # noqa: E731
    return AskedEvent(
        row.whole("step"), row.text("env"), number("target"), row.whole("episodes"), row.number("episode_return"),
        row.number("deviation"), row.number("length"), number("success"),
    )  # fmt: skip


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


def asked_picture(
    runs: Mapping[str, Sequence[AskedEvent]], env: str, data: tuple[float, float]
) -> Picture | None:  # fmt: skip
    """Mean return got against return asked for; data: the smallest and largest return of the recorded episodes."""
    told = {
        name: sorted((e for e in some if not math.isnan(e.target)), key=lambda e: e.target)
        for name, some in runs.items()
    }
    told = {name: some for name, some in told.items() if some}
    if not told:
        return None
    figure, ((axis,),) = subplots(1, 1, width=6.6, height=4.4)
    ends = []
    for (name, some), colour in zip(told.items(), colours(len(told)), strict=True):
        x, y = np.array([e.target for e in some]), np.array([e.episode_return for e in some])
        spread = np.array([e.deviation for e in some])
        axis.errorbar(
            x, y, yerr=spread, color=colour, marker="o", markersize=4, linewidth=1.8, elinewidth=0.8, capsize=2
        )
        ends.append((x[-1], y[-1], plain(name, 22), colour))
    every = [e.target for some in told.values() for e in some]
    line = [min(every), max(every)]
    axis.plot(line, line, color=GREY, linewidth=1.0, linestyle="--", zorder=1)
    axis.axvspan(*data, color=GREY, alpha=0.12, linewidth=0)
    axis.set_xlabel("return asked for")
    axis.set_ylabel("return got")
    grid(axis)
    below = "Bars: standard deviation over episodes. Dashed: what was asked. Shaded: the returns of the data."
    frame(figure, f"Return asked against return got: {plain(env)}", below, beside=1.4)
    label_ends(axis, ends)
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


def write_imitation_report(paths: Sequence[Path], out: Path) -> Path:
    """Draw the pictures and write report.html into `out`; returns the page's path."""
    runs = [read_imitation(path) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    body = [html.heading(1, "Learning from recorded episodes")]
    body += [html.paragraph(said(run)) for run in runs]
    lowest, highest = min(run.returns[0] for run in runs), max(run.returns[1] for run in runs)
    pictures = [
        loss_picture(runs),
        asked_picture({run.name: run.asked for run in runs}, runs[0].env, (lowest, highest)),
    ]
    for picture in pictures:
        if picture is not None:
            body.append(html.picture(picture.title, picture.sentence, picture.save(out / f"{picture.name}.png")))
    for run in runs:
        cells = [[section, json.dumps(values, ensure_ascii=False)] for section, values in run.config.items()]
        body.append(html.folded(f"Configuration of {run.name}", html.table(["section", "values"], cells, "long")))
    page = out / "report.html"
    write_text(page, html.page("Learning from recorded episodes", body).encode(errors="replace").decode())
    return page
