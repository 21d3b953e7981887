"""The report of training runs: pictures, and one page that holds them all and works without a network."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from spanformer.core.files import write_text
from spanformer.report import html
from spanformer.report.compare_pictures import compare_pictures
from spanformer.report.compare_table import side_by_side
from spanformer.report.drawing import Picture
from spanformer.report.events import Run, read_runs
from spanformer.report.measures import (
    NOTHING,
    amount,
    counted_share,
    exact,
    lasting,
    looks_back,
    mean_depth,
    pace,
    percent,
    predicted,
    quality,
    said_parts,
    share,
    size,
    step_times,
    tokens,
)
from spanformer.report.measures import evals as evals_of
from spanformer.report.run_pictures import run_pictures
from spanformer.report.spans_text import summary


def write_report(runs: Sequence[Path], out: Path) -> Path:
    """Read the runs' event files, write every picture and report.html to `out`, and return the page's path.

    A picture without data (no measured cost, no evaluation, only one run) is left out.
    """
    if not runs:
        raise ValueError("no run was given; expected the folder of at least one training run")
    read = read_runs(runs)
    names = [run.name for run in read]
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder to write the report into")
    out.mkdir(parents=True, exist_ok=True)
    title = names[0] if len(read) == 1 else f"{len(read)} runs"
    body = [html.heading(1, f"Training report: {title}")]
    if len(read) > 1:
        anchors = [(f"run-{at}", name) for at, name in enumerate(names, start=1)]
        body += [html.links(anchors), *_together(read, names, out)]
    for at, (run, name) in enumerate(zip(read, names, strict=True), start=1):
        prefix = "" if len(read) == 1 else f"{at}-{file_name(name)}-"
        body += [html.heading(2, name, f"run-{at}")] if len(read) > 1 else []
        body += _alone(run, out, prefix)
    path = out / "report.html"
    page = html.page(f"Training report: {title}", body)
    write_text(path, page.encode(errors="replace").decode())  # JSON can contain lone surrogates
    return path


def _alone(run: Run, out: Path, prefix: str) -> list[str]:
    """One run: headline numbers, pictures, heads, notes, configuration."""
    parts = [html.paragraph(summary(run)), html.cards(_headline(run))]
    parts += _drawn(run_pictures(run), out, prefix)
    if run.steps:
        parts += [html.heading(3, "Every head"), _heads(run)]
    parts += [html.heading(3, "Notes"), _notes(run)]
    return [*parts, html.folded("Configuration", html.table(["key", "value"], _settings(run).items(), "long"))]


def _together(runs: list[Run], names: list[str], out: Path) -> list[str]:
    """All runs: a table side by side, what differs in their configurations, and their pictures."""
    parts = [html.table(*side_by_side(runs, names), "numbers")]
    settings = [_settings(run) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in settings for key in each) if not key.startswith("machine.")]
    differing = [key for key in keys if len({each.get(key) for each in settings}) > 1]
    if differing:
        rows = [[key, *(each.get(key, NOTHING) for each in settings)] for key in differing]
        parts += [html.heading(3, "What differs in their configurations"), html.table(["key", *names], rows)]
    units = {run.start.bits_unit: None for run in runs}
    if len(units) > 1:
        parts.append(html.paragraph(f"These runs count bits per {', per '.join(units)}: they cannot be compared."))
    return parts + _drawn(compare_pictures(runs, names), out, "")


def _drawn(pictures: list[Picture], out: Path, prefix: str) -> list[str]:
    return [html.picture(each.title, each.sentence, each.save(out / f"{prefix}{each.name}.png")) for each in pictures]


def _headline(run: Run) -> list[tuple[str, str, str]]:
    unit, valid, test = run.start.bits_unit, evals_of(run, "valid"), evals_of(run, "test")
    curve = quality(run).bits
    items = []
    if len(curve):
        remark = f"{'validation' if valid else 'training'}, first and last"
        remark += f"; perplexity {2 ** min(curve[-1], 64):.4g}" if unit.endswith("word") else ""
        items.append((f"bits per {unit}", f"{curve[0]:.3f} → {curve[-1]:.3f}", remark))
    if test:
        items.append((f"test bits per {unit}", f"{test[-1].bits:.3f}", f"at step {test[-1].step:,}"))
    if (right := exact(run)) is not None:
        items.append((right[0], f"{100 * right[1]:.2f} %", "validation, last"))
    items.append(("parameters", amount(run.start.parameters), f"{run.start.shape.layers} layers"))
    if math.isfinite(depth := mean_depth(run)):
        items.append(("layers of a token", f"{depth:.2f}", f"of {run.start.shape.layers}, on average"))
    if not run.steps:
        return items
    last, costs = run.steps[-1], predicted(run)
    looks = looks_back(last)
    passes = last.tokens / trained if (trained := run.start.tokens.get("train")) else math.nan
    remark = f"{passes:.2g} times the training text" if math.isfinite(passes) else ""
    items += [
        ("tokens seen", amount(last.tokens), remark),
        ("training time", lasting(last.seconds), f"{last.step:,} steps, {lasting(pace(run))} each"),
        ("average span", tokens(float(looks.mean())), f"tokens, of {run.start.shape.max_span:,} allowed"),
        ("longest span", tokens(float(looks.max())), "tokens"),
    ]
    if math.isfinite(last.choice_entropy):
        known = math.isfinite(last.choice_variance)
        remark = f"gradient's variance {last.choice_variance:.2g}" if known else "of a key by hard attention"
        items.append(("entropy of a choice", f"{last.choice_entropy:.2f} bits", remark))
    if (times := step_times(run)) is not None:
        items.append(("time of a step", lasting(sum(times["learned"].values())), said_parts(times["learned"])))
    if costs is None:
        counted = percent(counted_share(run))
        return items if counted == NOTHING else [*items, ("FLOPs of a step", counted, "of full attention's, counted")]
    learned, whole = costs
    return [
        *items,
        ("attention FLOPs", percent(share(learned.by_span, whole.by_span)), "of full attention, predicted"),
        ("FLOPs of a step", percent(share(learned.total, whole.total)), "of full attention's, predicted"),
        ("cached states", size(learned.state_bytes), f"full attention: {size(whole.state_bytes)}"),
    ]


def _heads(run: Run) -> str:
    """Span and reach of every head, a line for each layer."""
    last = run.steps[-1]
    header = ["layer", *(f"head {head + 1}" for head in range(run.start.shape.heads)), "mean", "memory"]
    rows = []
    for layer, (z, r, looks) in enumerate(zip(last.spans, last.reach, looks_back(last), strict=True)):
        cells = [f"{tokens(span)} ({reach:,})" for span, reach in zip(z, r, strict=True)]
        kept = f"{last.memory[layer]:,}" if layer < len(last.memory) else NOTHING
        rows.append([str(layer + 1), *cells, tokens(float(looks.mean())), kept])
    said = "Span in tokens, in brackets how many distances the head looks at, its ramp included. Memory: cached states."
    return html.paragraph(said) + html.table(header, rows, "numbers")


def _notes(run: Run) -> str:
    """Notes of training, in the order of steps."""
    notes = [(note.step, note.text) for note in run.notes]
    notes += [(skip.step, f"Skipped: {skip.reason}") for skip in run.skips]
    notes += [(resume.step, "Resumed from here.") for resume in run.resumes]
    notes += [(run.stop.step, f"Stopped: {run.stop.reason}")] if run.stop else []
    rows = [[f"{step:,}", text] for step, text in sorted(notes, key=lambda each: each[0])]
    end = "" if run.stop else html.paragraph("No stop was recorded: the run still goes on, or was killed.")
    return (html.table(["step", "note"], rows, "long") if rows else "") + end


def _settings(run: Run) -> dict[str, str]:
    """The configuration, then the machine, as dotted keys and values."""
    begun = run.start
    found = _flat(begun.config, "") | _flat(begun.machine, "machine.") | {"spanformer": begun.version}
    if 0 < begun.time < 1e11:
        found["started"] = f"{datetime.fromtimestamp(begun.time, UTC):%Y-%m-%d %H:%M} UTC"
    return found


def _flat(settings: dict, above: str) -> dict[str, str]:
    found = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:40] or "run"
