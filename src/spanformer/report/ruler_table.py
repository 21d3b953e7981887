"""The rows of `bench ruler`: what each must hold, the full model's score beside it, and the table.

benchmarks/kvpress_methods.py writes rows into the same file, so every row is checked when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spanformer.core.text import printable
from spanformer.report.compare_table import markdown

Row = dict[str, Any]


def check_rows(parts: Mapping[str, Any], path: Path) -> dict[str, Row]:
    """The rows of a result file by name; a ValueError if one is none, or if they answered different questions."""
    rows: dict[str, Any] = {name: part.get("found") if isinstance(part, dict) else {} for name, part in parts.items()}
    for name, row in rows.items():
        if (what := _missing(row)) is not None:
            raise ValueError(
                f"{path}: the row {printable(name)} has no {what} as bench ruler and benchmarks/kvpress_methods.py "
                "write it; choose another --out"
            )
    first = next(iter(rows), "")
    for name, row in rows.items():
        if row["settings"] != rows[first]["settings"]:
            raise ValueError(
                f"{path} holds {printable(first)} and {printable(name)}, measured with other questions, texts or "
                "settings; expected the same for all rows: repeat the options, or choose another --out"
            )
    return rows


def _missing(row: Any) -> str | None:
    """The name of what is not as it should be."""
    if not isinstance(row, dict):
        return "measurements"
    if not isinstance(row.get("settings"), dict) or type(row.get("full")) is not bool:
        return "settings"
    if not isinstance(row.get("of"), str) or row.get("bits") not in (16, 8, 4):
        return "model"
    tasks = row.get("tasks")
    if not isinstance(tasks, dict) or not tasks or not all(map(_is_task, tasks.values())):
        return "tasks"
    loss = row.get("loss")
    if loss is not None and not (isinstance(loss, dict) and _is_number(loss.get("bits_per_byte"))):
        return "loss"
    needles = row.get("needles")
    if needles is not None and not (isinstance(needles, list) and all(map(_is_needle, needles))):
        return "needles"
    return None


def _is_task(task: object) -> bool:
    if not isinstance(task, dict):
        return False
    scores, held = task.get("scores"), task.get("kv_bytes")
    if not isinstance(scores, list) or not isinstance(held, list) or not len(scores) == len(held) > 0:
        return False
    return all(map(_is_number, [*scores, *held])) and all(0 <= each <= 1 for each in scores)


def _is_needle(found: object) -> bool:
    return isinstance(found, dict) and all(_is_number(found.get(key)) for key in ("context", "depth", "accuracy"))


def _is_number(found: Any) -> bool:
    return isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found)


def ceiling_of(name: str, rows: Mapping[str, Row]) -> str | None:
    """The row of the full model in 16 bits that this row is compared with: that of its own model, or the only one."""
    full = [each for each, row in rows.items() if row["full"] and row["bits"] == 16]
    own = [each for each in full if rows[each]["of"] == rows[name]["of"]]
    return own[0] if own else full[0] if len(full) == 1 else None


def task_score(row: Row, task: str) -> float:
    """In percent."""
    return 100 * mean(row["tasks"][task]["scores"])


def mean_score(row: Row) -> float:
    """Over tasks, in percent."""
    return mean([task_score(row, task) for task in row["tasks"]])


def kv_bytes(row: Row) -> float:
    """Of the prompts, the mean over all questions."""
    return mean([held for task in row["tasks"].values() for held in task["kv_bytes"]])


def over(row: Row, full: Row) -> tuple[float, float]:
    """(how much higher the mean score is than the full model's, its standard error), in percent. Both rows answered
    the same questions, so the error is that of their differences; NaN if a task has one question only."""
    change, variance = [], 0.0
    for task, found in row["tasks"].items():
        pairs = zip(found["scores"], full["tasks"][task]["scores"], strict=True)
        each = [100 * (mine - theirs) for mine, theirs in pairs]
        change.append(mean(each))
        squares = sum((x - change[-1]) ** 2 for x in each)
        variance += squares / (len(each) - 1) / len(each) if len(each) > 1 else math.nan
    return mean(change), math.sqrt(variance) / len(change)


def ordered(rows: Mapping[str, Row]) -> dict[str, Row]:
    """From the largest KV cache to the smallest."""
    return dict(sorted(rows.items(), key=lambda pair: (not pair[1]["full"], -kv_bytes(pair[1]))))


def table(rows: Mapping[str, Row]) -> str:
    """Markdown: a cell is the row's score and, after a stroke, the full model's."""
    tasks = list(next(iter(rows.values()))["tasks"])
    head = ["model", "KV cache, MB", *tasks, "mean", "over full", "bits per byte", "from KV cache, MB"]
    return markdown(head, [[printable(name), *_cells(name, row, rows, tasks)] for name, row in rows.items()])


def _cells(name: str, row: Row, rows: Mapping[str, Row], tasks: list[str]) -> list[str]:
    top = ceiling_of(name, rows)
    full = None if top is None or top == name else rows[top]
    loss = row.get("loss") or {}
    scores = [f"{task_score(row, task):.0f}" for task in tasks] + [f"{mean_score(row):.1f}"]
    change = "–"
    if full is not None:
        above = [f"{task_score(full, task):.0f}" for task in tasks] + [f"{mean_score(full):.1f}"]
        scores = [f"{mine} / {theirs}" for mine, theirs in zip(scores, above, strict=True)]
        above_full, error = over(row, full)
        change = f"{above_full:+.1f}" + (f" ± {error:.1f}" if math.isfinite(error) else "")
    bits = f"{loss['bits_per_byte']:.4f}" if loss else "–"
    held = f"{loss['kv_bytes'] / 1e6:.2f}" if _is_number(loss.get("kv_bytes")) else "–"
    return [f"{kv_bytes(row) / 1e6:.2f}", *scores, change, bits, held]


def needle_table(row: Row) -> str:
    """Pass keys found, by length (rows) and depth (columns), in percent."""
    depths = sorted({each["depth"] for each in row["needles"]})
    contexts = sorted({each["context"] for each in row["needles"]})
    at = {(each["context"], each["depth"]): each["accuracy"] for each in row["needles"]}
    head = ["tokens", *(f"depth {depth:g}" for depth in depths)]
    return markdown(head, [[f"{n:,}", *(f"{100 * at[n, depth]:.0f}" for depth in depths)] for n in contexts])


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
