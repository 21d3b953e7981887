"""One table of several comparisons that differ only in their seed: mean and range of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from spanformer.core.text import printable
from spanformer.report.compare_rows import CompareRow
from spanformer.report.compare_table import telling
from spanformer.report.measures import NOTHING, amount, lasting, percent, size, tokens

Show = Callable[[float], str]
"""a value in words"""
NOTES = {
    "seeds": "Means over seeds; in brackets the smallest and the largest.",
    "by arithmetic": "Attention FLOPs are relative to full attention: as counted, where whole blocks are computed, and "
    "by arithmetic from how far heads reach, which is too much for a pattern with gaps.",
    "attention": "A step is the time of attention, of other products of matrices, of the optimiser and of the rest.",
    "saving": "Saving: by how much a step is shorter than that of full attention, as a share of the time which that "
    "spends in attention; 100 % would be a step without attention.",
}
"""what columns mean"""


def notes(header: Sequence[str]) -> list[str]:
    """The sentences below a table with these columns."""
    return [text for column, text in NOTES.items() if column in header]


def seeds_table(comparisons: Mapping[str, Sequence[CompareRow]]) -> tuple[list[str], list[list[str]]]:
    """A header and a row for each run. comparisons: their rows by the name of the folder."""
    arms: dict[str, dict[str, CompareRow]] = {}
    for place, rows in comparisons.items():
        for row in rows:
            arms.setdefault(row.run, {})[place] = row
    everything = [row for found in arms.values() for row in found.values()]
    check_seeds(arms)
    columns = _columns(everything)
    table = []
    for name, found in arms.items():
        rows = list(found.values())
        cells = [said([of(row) for row in rows], show) for of, show in columns.values()]
        table.append([printable(name), str(len(rows)), *cells])
    return telling(["run", "seeds", *columns], table)


def check_seeds(arms: Mapping[str, Mapping[str, CompareRow]]) -> None:
    """Raise ValueError unless the rows of each run are of one model and of different seeds, all in one unit."""
    units = {row.unit: place for found in arms.values() for place, row in found.items()}
    if len(units) > 1:
        (unit, place), (other, elsewhere), *_ = units.items()
        raise ValueError(f"{place} counts bits per {unit} and {elsewhere} per {other}; expected the same for all")
    for name, found in arms.items():
        (first, row), *others = found.items()
        for place, other in others:
            for what in ("attention", "parameters"):
                if (then := getattr(row, what)) != (now := getattr(other, what)):
                    raise ValueError(
                        f"{name} has {what} = {then!r} in {first} and {now!r} in {place}; expected the same model with "
                        "another seed"
                    )
        seeds: dict[int, str] = {}
        for place, each in found.items():
            if each.seed in seeds:
                raise ValueError(
                    f"{name} has the seed {each.seed} in {seeds[each.seed]} and in {place}; expected another seed for "
                    "each comparison (--train.seed)"
                )
            seeds[each.seed] = place


def _columns(rows: Sequence[CompareRow]) -> dict[str, tuple[Callable[[CompareRow], float | None], Show]]:
    """What is shown of each run, by its title."""
    reached = _range([row.equal_tokens for row in rows], amount)
    trained = _range([row.equal_seconds for row in rows], lasting)
    read = _range([row.test_tokens or None for row in rows], amount)
    return {
        f"bits per {rows[0].unit}": (lambda row: row.bits, bits),
        f"bits at {reached} tokens": (lambda row: row.bits_at_equal_tokens, bits),
        f"bits at {trained}": (lambda row: row.bits_at_equal_seconds, bits),
        f"test bits, {read} tokens": (lambda row: row.test_bits, bits),
        "average span": (lambda row: row.span_average, tokens),
        "longest span": (lambda row: row.span_longest, tokens),
        "attention FLOPs, counted": (lambda row: row.attention_share, percent),
        "by arithmetic": (lambda row: row.predicted_attention_share, percent),
        "a step": (lambda row: row.seconds_per_step, lasting),
        "attention": (lambda row: row.attention_seconds, lasting),
        "other products": (lambda row: row.products_seconds, lasting),
        "optimiser": (lambda row: row.optimizer_seconds, lasting),
        "the rest": (lambda row: row.rest_seconds, lasting),
        "saving": (lambda row: row.saving, percent),
        "peak memory": (lambda row: row.peak_bytes, size),
    }


def bits(value: float) -> str:
    return f"{value:.3f}"


def said(values: Sequence[float | None], show: Show) -> str:
    """The mean, and the range if there is one: "2.01 (1.99 … 2.03)"; of fewer values than seeds, how many."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return NOTHING
    low, high = show(min(known)), show(max(known))
    shown = show(sum(known) / len(known)) + (f" ({low} … {high})" if low != high else "")
    return shown if len(known) == len(values) else f"{shown}, {len(known)} of {len(values)}"


def _range(values: Sequence[float | None], show: Show) -> str:
    """The value of all comparisons, or the smallest and the largest: "2.81 M to 2.87 M"."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    ends = [show(end) for end in (min(known), max(known))] if known else [NOTHING]
    return " to ".join(dict.fromkeys(ends))
