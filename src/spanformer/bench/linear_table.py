"""The results of `bench linear` as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spanformer.bench.results import PartsFile
from spanformer.report.compare_table import markdown


def tables(file: PartsFile) -> str:
    """A table for each part that the file holds, with its title; "" if it holds none."""
    makers = {"speed": _speed, "flat": _flat, "memory": _memory, "peers": peers, "decode": _decode}
    return with_titles(file, makers, TITLES)


def with_titles(file: PartsFile, makers: Mapping[str, Callable[[list[dict]], str]], titles: Mapping[str, str]) -> str:
    """The table of each part that the file holds, below its title."""
    shown = [f"{titles[part]}\n\n{make(file.found(part))}" for part, make in makers.items() if file.found(part)]
    return "\n\n".join(shown)


TITLES = {
    "speed": "Times as fast as full causal SDPA, forward + backward (*: SDPA extrapolated by length squared):",
    "flat": "Microseconds per token, forward + backward:",
    "memory": "Peak memory of forward + backward beyond the inputs:",
    "peers": "Against other packages, forward + backward:",
    "decode": "Microseconds for one token, after texts of these lengths:",
}


def _speed(rows: list[dict]) -> str:
    lengths = sorted({row["length"] for row in rows})
    kinds = dict.fromkeys(row["kind"] for row in rows)
    cells = {(row["kind"], row["length"]): _times(row) for row in rows}
    lines = [[f"`{kind}`", *(cells.get((kind, n), "–") for n in lengths)] for kind in kinds]
    return markdown(["", *(f"{n:,}" for n in lengths)], lines)


def _times(row: dict) -> str:
    if "wrong" in row:
        return "WRONG"
    return ratio(row["times_as_fast"]) + ("*" if row["sdpa_extrapolated"] else "")


def _flat(rows: list[dict]) -> str:
    header = ["", *(f"{n:,}" for n in rows[0]["lengths"]), "longest / shortest"]
    return markdown(header, [
        [f"`{row['kind']}`", "WRONG", *["–"] * len(row["lengths"])] if "wrong" in row
        else [f"`{row['kind']}`", *(f"{each:.2f}" for each in row["us_per_token"]), f"{1 + row['spread']:.2f}"]
        for row in rows
    ])  # fmt: skip


def _memory(rows: list[dict]) -> str:
    lines = [
        [f"`{row['kind']}`", f"{row['length']:,}", row["reason"], "–"] if "reason" in row
        else [f"`{row['kind']}`", f"{row['length']:,}", f"{row['peak_mib']:,.0f}", f"{row['units_of_q']:.1f}"]
        for row in rows
    ]  # fmt: skip
    return markdown(["", "tokens", "MiB", "in units of q"], lines)


def peers(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        line = [row["task"], row["name"], f"{row['length']:,}"]
        if reason := row.get("skipped") or row.get("wrong"):
            lines.append([*line, f"{'skipped' if 'skipped' in row else 'WRONG'}: {reason}", "–", "–", "–"])
            continue
        faster = "–" if row["name"] == "ours" or row["ours_times_as_fast"] is None else ratio(row["ours_times_as_fast"])
        lines.append([*line, f"{row['ms']:.1f}", faster, f"{row['off']:.0e}", f"{100 * row['changed_rows']:.0f} %"])
    return markdown(
        ["", "by", "tokens", "ms", "ours is faster by", "error", "earlier rows changed by the last token"], lines
    )


def _decode(rows: list[dict]) -> str:
    contexts, context = rows[0]["contexts"], rows[0]["sdpa_context"]
    header = ["", *(f"{n:,}" for n in contexts), f"SDPA over {context:,}", "times as fast", "state, KiB"]
    return markdown(header, [
        [f"`{row['kind']}`", *(f"{each:.1f}" for each in row["us"]), f"{row['sdpa_us']:,.0f}",
         ratio(row["times_as_fast"]), f"{row['state_bytes'] / 1024:,.0f}"]
        for row in rows
    ])  # fmt: skip


def ratio(number: float) -> str:
    return f"{number:.1f}×" if number < 20 else f"{number:.0f}×"
