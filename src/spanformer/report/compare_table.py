"""Several runs as one table: quality, time, operations, memory, and the Pareto fronts of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from spanformer.report.equal import at_equal
from spanformer.report.events import Run
from spanformer.report.measures import (
    NOTHING,
    amount,
    counted_per_token,
    counted_share,
    exact,
    lasting,
    looks_back,
    mean_depth,
    peak_bytes,
    percent,
    predicted,
    quality,
    seconds_per_step,
    share,
    size,
    tokens,
)
from spanformer.report.measures import evals as evals_of
from spanformer.report.pareto import fronts

BITS = "bits per unit"
HEADER = ["run", BITS, "test bits", "exactly right", "parameters", "tokens", "time", "a step", "FLOPs a token",
          "FLOPs, of full", "layers", "peak memory", "average span", "longest span", "best by"]  # fmt: skip


def side_by_side(runs: Sequence[Run], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """A header and a row for each run. FLOPs are those of a training step; of full: the same model with full attention.
    Spans: how far heads look back, or in an encoder to either side. Best by: the costs for which no other run is both
    better and cheaper. Where runs read different numbers of tokens, or trained for different times, bits at the
    smallest of these follow the final ones."""
    best, units = best_by(runs, names), {run.start.bits_unit for run in runs}
    header = [f"bits per {next(iter(units))}" if name == BITS and len(units) == 1 else name for name in HEADER]
    rows = [_row(run, name, best.get(name, [])) for run, name in zip(runs, names, strict=True)]
    for at, (name, bits) in enumerate(_equal_columns(runs).items(), HEADER.index(BITS) + 1):
        header.insert(at, name)
        for row, value in zip(rows, bits, strict=True):
            row.insert(at, f"{value:.3f}")
    return telling(header, rows)


def _equal_columns(runs: Sequence[Run]) -> dict[str, list[float]]:
    """Bits of each run at equal tokens and at equal time, by the name of their column; only what differs."""
    equal = at_equal(runs)
    columns = {}
    if equal.tokens_differ:
        columns[f"bits at {amount(equal.tokens)} tokens"] = equal.at_tokens
    if equal.seconds_differ:
        columns[f"bits at {lasting(equal.seconds)}"] = equal.at_seconds
    return columns


def telling(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Remove columns that are empty for all runs."""
    kept = [at for at in range(len(header)) if any(row[at] != NOTHING for row in rows)]
    return [header[at] for at in kept], [[row[at] for at in kept] for row in rows]


def best_by(runs: Sequence[Run], names: Sequence[str]) -> dict[str, list[str]]:
    """By run, the costs (FLOPs, time, memory) for which no other is both better and cheaper."""
    judged = {name: run for name, run in zip(names, runs, strict=True) if len(quality(run).bits)}
    best: dict[str, list[str]] = {}
    if len(judged) > 1 and len({run.start.bits_unit for run in runs}) == 1:
        for label, front in fronts(judged).items():
            for name in front:
                best.setdefault(name, []).append(_short(label))
    return best


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown, without columns that are empty for all runs."""
    header, rows = telling(header, rows)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _row(run: Run, name: str, best: list[str]) -> list[str]:
    curve, test, costs = quality(run).bits, evals_of(run, "test"), predicted(run)
    row = [name, f"{curve[-1]:.3f}" if len(curve) else NOTHING, f"{test[-1].bits:.3f}" if test else NOTHING,
           NOTHING if (right := exact(run)) is None else f"{right[1]:.1%}", amount(run.start.parameters)]  # fmt: skip
    if not run.steps:
        return [*row, *[NOTHING] * (len(HEADER) - len(row))]
    last, peak = run.steps[-1], peak_bytes(run)
    looks, of_full = looks_back(last), counted_share(run)
    if math.isnan(of_full) and costs is not None:
        of_full = share(costs[0].total, costs[1].total)
    row += [amount(last.tokens), lasting(last.seconds), lasting(seconds_per_step(run))]
    depth = mean_depth(run)
    row += [amount(counted_per_token(run)), percent(of_full), NOTHING if math.isnan(depth) else f"{depth:.2f}"]
    row += [NOTHING if math.isnan(peak) else size(peak)]
    return [*row, tokens(float(looks.mean())), tokens(float(looks.max())), ", ".join(best) or NOTHING]


def _short(label: str) -> str:
    """FLOPs, time or memory."""
    return next(word for word in ("FLOPs", "time", "memory") if word in label)
