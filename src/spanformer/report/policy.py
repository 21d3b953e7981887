"""The report of policies: learning curves of one or several runs, and their final evaluations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanformer.core.events import (
    FILE,
    ResumeEvent,
)
from spanformer.core.files import write_text
from spanformer.core.policy_events import PlayEvent, PolicyStartEvent, UpdateEvent
from spanformer.report import html
from spanformer.report.drawing import Picture, colours, frame, grid, label_ends, plain, subplots
from spanformer.report.rows import Line

SMOOTHED = 20
"""updates of the running mean"""


@dataclass(frozen=True)
class PolicyRows:
    """The rows of one run."""

    name: str
    env: str
    parameters: int
    config: dict
    updates: list[Line]
    played: Line | None
    """the last evaluation"""

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Environment steps, and the running mean of a number; updates without it are left out."""
        found = [(u.whole("env_steps"), u.number(key)) for u in self.updates if u.record.get(key) is not None]
        steps, values = np.array([s for s, _ in found]), np.array([v for _, v in found])
        sums = np.cumsum(np.concatenate([[0.0], values]))
        at = np.arange(1, len(values) + 1)
        first = np.maximum(at - SMOOTHED, 0)
        return steps, (sums[at] - sums[first]) / (at - first) if len(values) else values


def read_policy(path: Path) -> PolicyRows:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{path} has no {FILE}; expected the folder of a run of `spanformer rl train`")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = [Line(json.loads(line), f"{file}, line {n}") for n, line in enumerate(lines, 1)]
    if not rows or rows[0].record.get("event") != PolicyStartEvent.kind:
        raise ValueError(f"{file} does not begin a run of a policy; expected the folder of a run of `rl train`")
    kept: dict[tuple[str, int], Line] = {}
    for row in rows[1:]:
        kind, step = row.text("event"), row.whole("step")
        if kind == ResumeEvent.kind:  # later rows are void: these updates are repeated
            kept = {key: old for key, old in kept.items() if key[1] <= step}
        kept.pop((kind, step), None)
        kept[kind, step] = row
    first = rows[0]
    played = [row for (kind, _), row in kept.items() if kind == PlayEvent.kind]
    return PolicyRows(
        first.text("run"), first.text("env"), first.whole("parameters"), first.table("config"),
        [row for (kind, _), row in kept.items() if kind == UpdateEvent.kind], played[-1] if played else None,
    )  # fmt: skip


def curve_picture(runs: Sequence[PolicyRows]) -> Picture | None:
    """Share of right episodes if the environments tell it, else returns, against environment steps; learned spans."""
    told = any(len(run.curve("success")[0]) for run in runs)
    panels = [("success", "share of episodes that end well")] if told else []
    panels += [("episode_return", "return of an episode")]
    panels += (
        [("span_average", "average span (steps)")] if any(len(run.curve("span_average")[0]) for run in runs) else []
    )
    panels = [(key, name) for key, name in panels if any(len(run.curve(key)[0]) for run in runs)]
    if not panels:
        return None
    figure, (axes,) = subplots(1, len(panels), width=5.2 * len(panels) + 1, height=4.0)
    for axis, (key, name) in zip(axes, panels, strict=True):
        axis.ends = []
        for run, colour in zip(runs, colours(len(runs)), strict=True):
            steps, values = run.curve(key)
            if len(steps):
                axis.plot(steps / 1e3, values, color=colour, linewidth=1.8)
                axis.ends.append((steps[-1] / 1e3, values[-1], plain(run.name, 22), colour))
        axis.set_xlabel("environment steps (thousands)")
        axis.set_ylabel(name)
        grid(axis)
    below = f"Running means over {SMOOTHED} updates; actions are drawn at random while training."
    frame(figure, f"Learning curves: {plain(runs[0].env)}", below, beside=1.4)
    for axis in axes:
        label_ends(axis, axis.ends)
    return Picture("curves", "Learning curves", "Episodes through training, by environment steps.", figure)


def said(run: PolicyRows) -> str:
    """One sentence about a run."""
    last = run.updates[-1].whole("env_steps") if run.updates else 0
    text = f"{run.name}: {run.env}, {run.parameters:,} parameters, {last:,} environment steps"
    if run.played is None:
        return text
    right = run.played.record.get("success")
    share = "" if right is None else f", {100 * run.played.number('success'):.1f} % right"
    n = run.played.whole("episodes")
    return f"{text}; {n:,} episodes played: return {run.played.number('episode_return'):.3f}{share}"


def write_policy_report(paths: Sequence[Path], out: Path) -> Path:
    """Draw the curves and write report.html into `out`; returns the page's path."""
    runs = [read_policy(path) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    body = [html.heading(1, "Policies" if len(runs) > 1 else f"Policy: {runs[0].name}")]
    body += [html.paragraph(said(run)) for run in runs]
    picture = curve_picture(runs)
    if picture is not None:
        body.append(html.picture(picture.title, picture.sentence, picture.save(out / f"{picture.name}.png")))
    for run in runs:
        cells = [[section, json.dumps(values, ensure_ascii=False)] for section, values in run.config.items()]
        body.append(html.folded(f"Configuration of {run.name}", html.table(["section", "values"], cells, "long")))
    page = out / "report.html"
    write_text(page, html.page("Policies", body).encode(errors="replace").decode())
    return page
