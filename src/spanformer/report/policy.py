"""The report of policies: pictures and figures of one or several runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spanformer.core.files import write_text
from spanformer.report import html
from spanformer.report.policy_pictures import EpisodeMaps, curve_picture, episode_picture, span_picture
from spanformer.report.policy_rows import Arm, PolicyRows, arms_of, read_policy

RESULTS = "runs.json"
__all__ = ["read_policy", "said", "write_policy_report"]


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


def row_of(arm: Arm, run: PolicyRows) -> dict:
    """The figures of one run after its last update."""
    last, played = run.updates[-1].record if run.updates else {}, run.played.record if run.played else {}
    found = {
        "run": run.name, "arm": arm.name, "env": run.env, "length": run.length, "parameters": run.parameters,
        "seed": run.config.get("ppo", {}).get("seed"), "env_steps": last.get("env_steps"),
        "seconds": last.get("seconds"), "span_average": last.get("span_average"),
        **{name: played.get(name) for name in ("episodes", "episode_return", "success")},
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def write_policy_report(paths: Sequence[Path], out: Path, episodes: Sequence[EpisodeMaps] = ()) -> Path:
    """Draw the pictures and write report.html and the figures of all runs into `out`; returns the page's path."""
    runs = [read_policy(path) for path in paths]
    arms = arms_of(runs)
    out.mkdir(parents=True, exist_ok=True)
    body = [html.heading(1, "Policies" if len(runs) > 1 else f"Policy: {runs[0].name}")]
    body += [html.paragraph(said(run)) for run in runs]
    for picture in (curve_picture(arms), span_picture(arms), *map(episode_picture, episodes)):
        if picture is not None:
            body.append(html.picture(picture.title, picture.sentence, picture.save(out / f"{picture.name}.png")))
    for run in runs:
        cells = [[section, json.dumps(values, ensure_ascii=False)] for section, values in run.config.items()]
        body.append(html.folded(f"Configuration of {run.name}", html.table(["section", "values"], cells, "long")))
    rows = [row_of(arm, run) for arm in arms for run in arm.runs]
    write_text(out / RESULTS, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    page = out / "report.html"
    write_text(page, html.page("Policies", body).encode(errors="replace").decode())
    return page
