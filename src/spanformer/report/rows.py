"""Reads rows of a run's event file (core/events.py), and checks each value.

A file is untrusted: a value of another type raises an error that names the file, the
line and the key. Numbers that training could not compute (null, NaN) are read as NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from spanformer.core.events import (
    FORMAT,
    UNIT_NAMES,
    CheckpointEvent,
    CostEvent,
    DepthEvent,
    DynamicEvent,
    EvalEvent,
    Event,
    NoteEvent,
    ResumeEvent,
    SkipEvent,
    StartEvent,
    StepEvent,
    StopEvent,
)
from spanformer.core.shape import Shape

LARGEST = 2**53  # no run counts further, and float64 holds every whole number up to it


class Line:
    """One line's object; values are read by key and kind."""

    def __init__(self, record: dict, where: str) -> None:
        self.record, self.where = record, where

    def refuse(self, key: str, expected: str) -> ValueError:
        if key not in self.record:
            return ValueError(f"{self.where} has no {key!r}; expected {expected}")
        shown = repr(self.record[key])
        return ValueError(
            f"{self.where}: {key!r} is {shown if len(shown) <= 60 else shown[:60] + '…'}; expected {expected}"
        )

    def whole(self, key: str, *default: int) -> int:
        value = self.record.get(key, *default)
        if not _whole(value):
            raise self.refuse(key, "a whole number of at least 0")
        return value

    def number(self, key: str, *default: float) -> float:
        value = self.record.get(key, *(default or ("missing",)))
        if value is None:
            return math.nan
        if not _number(value):
            raise self.refuse(key, "a number")
        return float(value)

    def elapsed(self, key: str) -> float:
        if not _amount(self.record.get(key), gaps=False):
            raise self.refuse(key, "a number of seconds, 0 or more")
        return float(self.record[key])

    def text(self, key: str, *default: str) -> str:
        value = self.record.get(key, *default)
        if not isinstance(value, str):
            raise self.refuse(key, "text")
        return value.encode(errors="replace").decode()  # JSON can contain lone surrogates, which cannot be printed

    def table(self, key: str, *default: dict) -> dict:
        value = self.record.get(key, *default)
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return value

    def counts(self, key: str) -> dict[str, int]:
        value = self.table(key)
        if not all(_whole(count) for count in value.values()):
            raise self.refuse(key, "a whole number for each split")
        return value

    def both(self, key: str) -> dict[str, float]:
        """{"learned": …, "full": …} when both were measured, else nothing."""
        value = {name: number for name, number in self.table(key, {}).items() if number is not None}
        if not all(_number(number) for number in value.values()):
            raise self.refuse(key, "numbers")
        if not all(math.isfinite(value.get(name, math.nan)) for name in ("learned", "full")):
            return {}
        return {name: float(value[name]) for name in ("learned", "full")}

    def grid(self, key: str, rows: int, columns: int, *, gaps: bool) -> np.ndarray:
        """[rows, columns] numbers, 0 or more; with gaps, null is NaN."""
        value = self.record.get(key, [])
        rectangular = (
            isinstance(value, list)
            and len(value) == rows
            and all(isinstance(row, list) and len(row) == columns for row in value)
        )
        if not rectangular or not all(_amount(v, gaps) for row in value for v in row):
            raise self.refuse(key, f"{rows} lists of {columns} numbers, 0 or more")
        return np.array(value, dtype=np.float64).reshape(rows, columns)

    def wholes(self, key: str) -> list[int]:
        value = self.record.get(key, [])
        if not isinstance(value, list) or not all(_whole(v) for v in value):
            raise self.refuse(key, "a list of whole numbers")
        return value

    def shape(self, key: str) -> Shape:
        if not all(_whole(value) for value in self.table(key).values()):
            raise self.refuse(key, "whole numbers, 0 or more")
        try:
            return Shape(**self.table(key))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.where}: {key!r} does not fit: {error}") from None


def read_start(line: Line) -> StartEvent:
    if line.record.get("format") != FORMAT:
        raise ValueError(
            f"{line.where}: format is {line.record.get('format')!r}; expected {FORMAT}: "
            "report with the version that trained"
        )
    unit, objective = line.text("unit"), line.text("objective", "lm")
    tokens, units = line.counts("tokens"), line.counts("units")
    if unit not in UNIT_NAMES:
        raise line.refuse("unit", f"one of {', '.join(UNIT_NAMES)}")
    return StartEvent(
        step=line.whole("step", 0), version=line.text("version", "unknown"), time=line.number("time", math.nan),
        run=line.text("run"), config=line.table("config", {}), parameters=line.whole("parameters"), unit=unit,
        tokens=tokens, units=units, shape=line.shape("shape"), machine=line.table("machine", {}), objective=objective,
    )  # fmt: skip


def read_row(line: Line, shape: Shape) -> Event | None:
    """The event of a line after the first; None for an unknown kind."""
    read = READERS.get(line.text("event"))
    return read(line, shape) if read else None


def _step(line: Line, shape: Shape) -> StepEvent:
    return StepEvent(
        step=line.whole("step"), seconds=line.elapsed("seconds"), tokens=line.whole("tokens"), loss=line.number("loss"),
        penalty=line.number("penalty", math.nan), lr=line.number("lr", math.nan),
        grad_norm=line.number("grad_norm", math.nan), tokens_per_second=line.number("tokens_per_second", math.nan),
        spans=line.grid("spans", shape.layers, shape.heads, gaps=True),
        reach=line.grid("reach", shape.layers, shape.heads, gaps=False).astype(np.int64),
        memory=line.wholes("memory"), resident_bytes=line.whole("resident_bytes", 0),
        choice_entropy=line.number("choice_entropy", math.nan),
        choice_variance=line.number("choice_variance", math.nan),
        depth=line.number("depth", math.nan), price=line.number("price", math.nan),
        attention_share=line.number("attention_share", math.nan), budget=line.number("budget", math.nan),
    )  # fmt: skip


def _eval(line: Line, shape: Shape) -> EvalEvent:
    return EvalEvent(
        step=line.whole("step"), seconds=line.elapsed("seconds"), split=line.text("split"), loss=line.number("loss"),
        bits=line.number("bits"), tokens=line.whole("tokens", 0), exact=line.number("exact", math.nan),
        depth=line.number("depth", math.nan),
    )  # fmt: skip


def _cost(line: Line, shape: Shape) -> CostEvent:
    names = [each.name for each in fields(CostEvent) if each.name not in ("step", "time", "tokens")]
    measured: dict[str, Any] = {name: line.both(name) for name in names}
    if not measured["optimizer_seconds"]:  # older files have only the time of forward and backward, not of a step
        measured["step_seconds"] = {}
    return CostEvent(line.whole("step"), **measured, tokens=line.whole("tokens", 0))


def _dynamic(line: Line, shape: Shape) -> DynamicEvent:
    text, names = line.text("text"), line.record.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise line.refuse("names", "a list of names")
    return DynamicEvent(line.whole("step"), text, line.grid("spans", len(names), len(text), gaps=True), names)


def _depth(line: Line, shape: Shape) -> DepthEvent:
    text, layers, most = line.text("text"), line.wholes("layers"), line.whole("most")
    if len(layers) != len(text) or max(layers, default=0) > most:
        raise line.refuse("layers", f"a number of layers, at most {most}, for each of {len(text)} characters")
    return DepthEvent(line.whole("step"), text, layers, most)


READERS: dict[str, Callable[[Line, Shape], Event]] = {
    StepEvent.kind: _step,
    EvalEvent.kind: _eval,
    CostEvent.kind: _cost,
    DynamicEvent.kind: _dynamic,
    DepthEvent.kind: _depth,
    NoteEvent.kind: lambda line, shape: NoteEvent(line.whole("step"), line.text("text")),
    SkipEvent.kind: lambda line, shape: SkipEvent(line.whole("step"), line.text("reason")),
    CheckpointEvent.kind: lambda line, shape: CheckpointEvent(line.whole("step"), line.text("path")),
    StopEvent.kind: lambda line, shape: StopEvent(
        line.whole("step"), line.text("reason"), line.number("seconds", math.nan)
    ),
    ResumeEvent.kind: lambda line, shape: ResumeEvent(line.whole("step")),
}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def _number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST)


def _amount(value: object, gaps: bool) -> bool:
    """A finite number, 0 or more; or, with gaps, none at all."""
    if value is None or value != value:
        return gaps
    return _number(value) and 0 <= value < LARGEST  # pyright: ignore[reportOperatorIssue]
