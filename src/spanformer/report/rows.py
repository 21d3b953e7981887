"""The rows of a run's event file, each checked while it is read.

What a file holds was written by others: a value of another kind is refused with a sentence that names the file, the
line and the key. Numbers that training could not compute (null, NaN) are read as NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np

from spanformer.cost.model import Shape

FORMAT = 1
LARGEST = 2**53  # no run counts farther, and up to here every whole number is a float too
UNITS = ("byte", "char", "word")
SPELT = {"char": "character"}
"""units as people read them"""
ASKED = {"encoder": "masked", "seq2seq": "target"}
"""objectives whose bits are those of a token that is asked for, and what such a token is called"""


@dataclass(frozen=True)
class Start:
    version: str
    time: float
    run: str
    config: dict
    parameters: int
    unit: str
    """what bits are counted for: byte, character, word, masked byte, target token, …"""
    tokens: dict[str, int]
    """of each split"""
    units: dict[str, int]
    """bytes, characters or words of each split"""
    shape: Shape
    machine: dict
    objective: str = "lm"
    """what was learned: lm, seq2seq or encoder"""


@dataclass(frozen=True)
class Step:
    step: int
    seconds: float
    tokens: int
    loss: float
    """nats per token"""
    penalty: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    spans: np.ndarray
    """[layers, heads] tokens, without the ramp; NaN where a head learns none"""
    reach: np.ndarray
    """[layers, heads] distances looked at"""
    memory: list[int]
    """[layers] cached states"""
    resident_bytes: int


@dataclass(frozen=True)
class Eval:
    step: int
    seconds: float
    split: str
    loss: float
    bits: float
    """per unit"""
    tokens: int
    exact: float = math.nan
    """share that was exactly right: targets of pairs, or masked tokens; NaN where that is not asked"""


@dataclass(frozen=True)
class Cost:
    """Measured on one batch; each dict holds "learned" and "full", or neither. Times are those of a whole step and of
    parts of it: attention, products of matrices elsewhere, the optimiser."""

    step: int
    flops: dict[str, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    attention_seconds: dict[str, float] = field(default_factory=dict)
    products_seconds: dict[str, float] = field(default_factory=dict)
    optimizer_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """of the batch; 0: as many as a step has by its shape"""


@dataclass(frozen=True)
class Note:
    step: int
    text: str


@dataclass(frozen=True)
class Skip:
    step: int
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: str


@dataclass(frozen=True)
class Stop:
    step: int
    reason: str
    seconds: float


@dataclass(frozen=True)
class Dynamic:
    step: int
    text: str
    spans: np.ndarray
    """[names, characters] tokens"""
    names: list[str]


@dataclass(frozen=True)
class Resume:
    step: int


Row = Step | Eval | Cost | Note | Skip | Checkpoint | Stop | Dynamic | Resume


class Line:
    """One line's object; its values are asked for by key and kind."""

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
            raise self.refuse(key, "a whole number, 0 or more")
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
        return value.encode(errors="replace").decode()  # JSON can hold halves of characters, which cannot be printed

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


def start(line: Line) -> Start:
    if line.record.get("format") != FORMAT:
        raise ValueError(
            f"{line.where}: format is {line.record.get('format')!r}; expected {FORMAT}: "
            "report with the version that trained"
        )
    unit, objective = line.text("unit"), line.text("objective", "lm")
    tokens, units = line.counts("tokens"), line.counts("units")
    if unit not in UNITS:
        raise line.refuse("unit", f"one of {', '.join(UNITS)}")
    unit = SPELT.get(unit, unit)
    if objective in ASKED:
        unit = f"{ASKED[objective]} {unit if tokens.get('train') == units.get('train') else 'token'}"
    return Start(
        version=line.text("version", "unknown"), time=line.number("time", math.nan), run=line.text("run"),
        config=line.table("config", {}), parameters=line.whole("parameters"), unit=unit, tokens=tokens, units=units,
        shape=line.shape("shape"), machine=line.table("machine", {}), objective=objective,
    )  # fmt: skip


def row(line: Line, shape: Shape) -> Row | None:
    """The row of a line after the first; None for an event this report has no use for."""
    read = READERS.get(line.text("event"))
    return read(line, shape) if read else None


def _step(line: Line, shape: Shape) -> Step:
    return Step(
        step=line.whole("step"), seconds=line.elapsed("seconds"), tokens=line.whole("tokens"), loss=line.number("loss"),
        penalty=line.number("penalty", math.nan), lr=line.number("lr", math.nan),
        grad_norm=line.number("grad_norm", math.nan), tokens_per_second=line.number("tokens_per_second", math.nan),
        spans=line.grid("spans", shape.layers, shape.heads, gaps=True),
        reach=line.grid("reach", shape.layers, shape.heads, gaps=False).astype(np.int64),
        memory=line.wholes("memory"), resident_bytes=line.whole("resident_bytes", 0),
    )  # fmt: skip


def _eval(line: Line, shape: Shape) -> Eval:
    return Eval(
        step=line.whole("step"), seconds=line.elapsed("seconds"), split=line.text("split"), loss=line.number("loss"),
        bits=line.number("bits"), tokens=line.whole("tokens", 0), exact=line.number("exact", math.nan),
    )  # fmt: skip


def _cost(line: Line, shape: Shape) -> Cost:
    measured = {each.name: line.both(each.name) for each in fields(Cost) if each.name not in ("step", "tokens")}
    if not measured["optimizer_seconds"]:  # older files: the time of forward and backward, which is no step's
        measured["step_seconds"] = {}
    return Cost(line.whole("step"), **measured, tokens=line.whole("tokens", 0))


def _dynamic(line: Line, shape: Shape) -> Dynamic:
    text, names = line.text("text"), line.record.get("names")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise line.refuse("names", "a list of names")
    return Dynamic(line.whole("step"), text, line.grid("spans", len(names), len(text), gaps=True), names)


READERS = {
    "step": _step,
    "eval": _eval,
    "cost": _cost,
    "dynamic": _dynamic,
    "note": lambda line, shape: Note(line.whole("step"), line.text("text")),
    "skip": lambda line, shape: Skip(line.whole("step"), line.text("reason")),
    "checkpoint": lambda line, shape: Checkpoint(line.whole("step"), line.text("path")),
    "stop": lambda line, shape: Stop(line.whole("step"), line.text("reason"), line.number("seconds", math.nan)),
    "resume": lambda line, shape: Resume(line.whole("step")),
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
