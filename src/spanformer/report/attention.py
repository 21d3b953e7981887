"""Tables of an attention benchmark, from its result file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

KIND, FORMAT = "spanformer attention benchmark", 1
MEANING = {
    "A": "one head sees all, the rest 64 tokens",
    "B": "heads see 32, 48, 64, 96, 160, 256, 1024, all",
    "S": "every head sees 64 tokens",
    "M": "every head sees 512 tokens",
    "F": "every head sees all",
}
TITLES = {
    "cost": "Time of one call",
    "decode": "One decoding step, one query over a cache",
    "overhead": "What a call costs at length 16",
    "short": "Short sequences",
    "per_token": "Time per token as the sequence grows",
    "limit": "Share of this machine's matrix-product rate, by span",
    "streaming": "A block of queries after a cache, as the original code works",
    "memory": "Peak memory beyond the inputs",
    "long": "A long sequence",
}


def load(path: Path) -> dict:
    """Read a result file; raise a ValueError for any other file."""
    try:
        results = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; expected the result file of an attention benchmark") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder; expected the result file of an attention benchmark in it") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError(f"{path} is not JSON; expected the result file of an attention benchmark") from None
    if not isinstance(results, dict) or results.get("kind") != KIND:
        raise ValueError(
            f"{path} is JSON, but not a benchmark result; expected the result file of an attention benchmark"
        )
    if results.get("format") != FORMAT:
        raise ValueError(f"{path} has format {results.get('format')}; expected {FORMAT}: measure again")
    if not all(results.get(name) for name in ("machine", "rows")):
        raise ValueError(f"{path} has no machine or no rows; expected an unchanged result file of the benchmark")
    return results


def meaning(profile: str) -> str:
    """A profile in words."""
    return MEANING.get(profile) or f"every head sees {profile} tokens"


def machine_line(results: dict) -> str:
    """Hardware, versions, commit and date, in one line."""
    m = results["machine"]
    rate = results.get("sgemm_gflops")
    parts = [m["cpu"], f"{m['threads']} threads", f"torch {m['torch']}"]
    parts += [f"sgemm {rate:.0f} GFLOP/s"] if rate else []
    parts += [f"commit {m['commit']}"] if m.get("commit") else []
    return ", ".join([*parts, m["date"][:10]])


def mostly_disturbed(results: dict) -> bool:
    """Whether other processes took CPU time during more than half of all samples."""
    rows = results["rows"]
    return 2 * sum(row["disturbed"] for row in rows) > sum(row["samples"] for row in rows)


def groups(rows: Iterable[dict], *keys: str) -> dict[tuple, list[dict]]:
    """Rows by the values of some fields, in the order they come."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def tables(results: dict) -> list[Table]:
    """One table for each part, mode and choice of terms; then the contenders that were WRONG, and those skipped, with
    the reason."""
    made = []
    for rows in groups(results["rows"], "part", "mode", "terms", "streaming", "batch").values():
        if any(row["status"] == "ok" for row in rows):
            made.append(_table(rows))
    notes = [_wrong(results["rows"]), _skipped(results["rows"]), _about(results)]
    return made + [note for note in notes if note is not None]


def _table(rows: list[dict]) -> Table:
    """A line for each profile and contender, a column for each length; the rows share everything else."""
    part, mode, terms, streaming, batch = (rows[0][key] for key in ("part", "mode", "terms", "streaming", "batch"))
    details = [mode] if part != "decode" else []
    details += [f"with {terms.replace('_', ' ')}"] if terms != "plain" else []
    details += [f"{streaming} queries after the cache"] if streaming else []
    details += [f"batch of {batch}"] if batch > 1 else []
    table = Table(title=": ".join(filter(None, [TITLES.get(part, part), ", ".join(details)])), title_justify="left")
    table.add_column("profile")
    table.add_column("contender")
    lengths = sorted({row["length"] for row in rows})
    for length in lengths:
        table.add_column(f"{length:,}", justify="right")
    for (profile,), some in groups(rows, "profile").items():
        shown = profile
        for (label,), line in groups(some, "label").items():
            if all(row["status"] == "skipped" for row in line):
                continue
            by_length = {row["length"]: row for row in line}
            table.add_row(shown, label, *(_cell(part, by_length.get(length)) for length in lengths))
            shown = ""
        table.add_section()
    profiles = dict.fromkeys(row["profile"] for row in rows if not row["profile"].isdigit())
    table.caption = "\n".join(f"{profile}: {meaning(profile)}" for profile in profiles) or None
    table.caption_justify = "left"
    return table


def _cell(part: str, row: dict | None) -> Text:
    if row is None or row["status"] == "skipped":
        return Text("–", style="dim")
    if row["status"] == "WRONG":
        return Text("WRONG", style="bold red")
    first = [f"{row['peak_mib']:,.0f} MiB"] if row["peak_mib"] is not None else []
    if part == "per_token":
        first.append(f"{row['us_per_token']:.3g} µs/token")
    elif row["ms"] is not None:
        first.append(duration(row["ms"]))
    second = []
    if row["speedup"] is not None and abs(row["speedup"] - 1) > 1e-9:
        second.append(f"{row['speedup']:.2g}×" if row["speedup"] < 10 else f"{row['speedup']:.0f}×")
    if row["limit_share"] is not None and part in ("cost", "limit", "short"):
        second.append(f"{100 * row['limit_share']:.0f} %")
    if _disturbed(row):
        second.append("~")
    return Text("\n".join([*first, *([" ".join(second)] if second else [])]))


def _disturbed(row: dict) -> bool:
    return row["disturbed"] * 2 > row["samples"]


def duration(ms: float) -> str:
    """Milliseconds, in a unit that reads well."""
    if ms >= 10_000:
        return f"{ms / 1e3:.1f} s"
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms" if ms >= 0.1 else f"{1e3 * ms:.3g} µs"


def _wrong(rows: list[dict]) -> Table | None:
    wrong = [row for row in rows if row["status"] == "WRONG"]
    if not wrong:
        return None
    table = Table(
        "contender", "work", "difference from the oracle", title="WRONG: no speed is given", title_justify="left"
    )
    for row in wrong:
        table.add_row(row["label"], f"{row['mode']}, {row['profile']} {row['length']:,}, {row['terms']}", row["reason"])
    return table


def _skipped(rows: list[dict]) -> Table | None:
    reasons = groups((row for row in rows if row["status"] == "skipped"), "label", "reason")
    if not reasons:
        return None
    table = Table("contender", "skipped", "reason", title="Not measured", title_justify="left")
    for (label, reason), some in reasons.items():
        where = ", ".join(dict.fromkeys(row["part"].replace("_", " ") for row in some))
        table.add_row(label, where, reason)
    return table


def _about(results: dict) -> Table:
    table = Table(show_header=False, box=None, title="How to read this", title_justify="left")
    faster = "times as fast as SDPA's full causal attention in the same rounds (in streaming tables: as the original)"
    table.add_row("×", faster)
    share = "of the limit: 4·D operations forward and 10·D backward for each pair in the spans, at the rate of sgemm"
    table.add_row("%", share)
    if any(_disturbed(row) for row in results["rows"]):
        table.add_row("~", "other processes disturbed most samples: measure again on a quiet machine")
    table.add_row("", "each timed result was checked against the float64 oracle on the same shape")
    if results["machine"].get("memory_is_kept"):
        table.add_row(
            "", "malloc kept freed memory while timing, for every contender alike (--no-keep-memory: as it is)"
        )
    table.add_row("", machine_line(results))
    return table
