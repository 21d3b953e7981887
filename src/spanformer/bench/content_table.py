"""The results of `bench content` as Markdown tables."""

from __future__ import annotations

from spanformer.bench import linear_table
from spanformer.bench.results import PartsFile
from spanformer.report.compare_table import markdown


def tables(file: PartsFile) -> str:
    """A table for each part that the file holds, with its title; "" if it holds none."""
    makers = {"speed": _speed, "memory": _memory, "decode": _decode, "peers": linear_table.peers}
    return linear_table.with_titles(file, makers, TITLES)


TITLES = {
    "speed": "Times as fast as SDPA over all pairs of the same direction, forward + backward:",
    "memory": "Peak memory of forward + backward beyond the inputs:",
    "decode": "Microseconds for one token of a layer:",
    "peers": "Against other packages, forward + backward:",
}


def _speed(rows: list[dict]) -> str:
    lengths = sorted({row["length"] for row in rows})
    names = dict.fromkeys(row["name"] for row in rows)
    cells = {(row["name"], row["length"]): _times(row) for row in rows}
    return markdown(
        ["", *(f"{n:,}" for n in lengths)], [[name, *(cells.get((name, n), "–") for n in lengths)] for name in names]
    )


def _times(row: dict) -> str:
    return "WRONG" if "wrong" in row else linear_table.ratio(row["times_as_fast"])


def _memory(rows: list[dict]) -> str:
    lines = [
        [row["name"], f"{row['length']:,}", row["reason"], "–"] if "reason" in row
        else [row["name"], f"{row['length']:,}", f"{row['peak_mib']:,.0f}", f"{row['units_of_q']:.1f}"]
        for row in rows
    ]  # fmt: skip
    return markdown(["", "tokens", "MiB", "in units of q"], lines)


def _decode(rows: list[dict]) -> str:
    header = ["", "µs", "window of as many keys", "µs", "times a window", "KV cache, KiB"]
    return markdown(header, [
        [f"`{row['kind']}`", f"{row['us']:.0f}", f"`{row['window']}`", f"{row['window_us']:.0f}",
         f"{row['times_a_window']:.1f}", f"{row['cache_bytes'] / 1024:,.0f}"]
        for row in rows
    ])  # fmt: skip
