"""The rows of a run's events.jsonl, one class for each kind of event: training writes them, reports read them.

A row is one JSON object. `event` is the kind, `time` is in seconds since 1970, and the other keys are the fields below.
A number that is not finite is null in the file and NaN in Python. Readers ignore unknown keys and unknown kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np

from spanformer.core.shape import Shape

FILE = "events.jsonl"
FORMAT = 1
UNIT_NAMES = {"byte": "byte", "char": "character", "word": "word", "dimension": "dimension"}
"""units of bits: name in files, name in text"""
ASKED = {"encoder": "masked", "seq2seq": "target", "task": "answer"}
"""objectives that predict only some tokens, and the adjective for such a token"""


@dataclass(frozen=True)
class Event:
    """Base class: the fields of every event."""

    kind: ClassVar[str]
    step: int
    """optimiser steps taken so far"""
    time: float = field(default=math.nan, kw_only=True)
    """seconds since 1970; the log fills it in"""


@dataclass(frozen=True)
class StartEvent(Event):
    """A run begins. The first row of a file."""

    kind = "start"
    run: str
    """its name"""
    config: dict
    parameters: int
    unit: str
    """unit of the text: byte, char or word; of images: dimension"""
    tokens: dict[str, int]
    """tokens of each split"""
    units: dict[str, int]
    """bytes, characters or words of each split"""
    shape: Shape
    machine: dict
    version: str
    objective: str = "lm"
    """the model's kind, lm, seq2seq or encoder; or task or image"""
    format: int = FORMAT

    @property
    def bits_unit(self) -> str:
        """Unit of reported bits: byte, character, word, masked byte, target token, …"""
        unit = UNIT_NAMES[self.unit]
        if self.objective not in ASKED:
            return unit
        return f"{ASKED[self.objective]} {unit if self.tokens.get('train') == self.units.get('train') else 'token'}"


@dataclass(frozen=True)
class ResumeEvent(Event):
    """The run continues from a checkpoint. Earlier rows with a later step are void: those steps are repeated."""

    kind = "resume"
    path: str = ""
    """path of the checkpoint"""
    unit: str = "byte"
    seconds: float = math.nan
    """seconds of training steps so far"""


@dataclass(frozen=True)
class StepEvent(Event):
    """Optimiser steps since the previous row; losses are means over them."""

    kind = "step"
    seconds: float
    """seconds of training steps since the start of the run"""
    tokens: int
    """tokens since the start of the run"""
    loss: float
    """nats per token"""
    penalty: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    spans: np.ndarray
    """[layers, heads] learned spans in tokens, without the ramp; NaN for a head that learns none"""
    reach: np.ndarray
    """[layers, heads] number of distances that a head attends to"""
    memory: list[int]
    """[layers] hidden states that segments remember, or keys that a KV cache holds"""
    resident_bytes: int = 0
    """peak memory of the process"""
    bits: float = math.nan
    """per unit"""
    span_average: float = math.nan
    span_longest: float = math.nan
    price: float = math.nan
    """of one token of window, while `fit-spans` or a run with a budget learns windows"""
    attention_share: float = math.nan
    """of full attention's distances: how many heads compute; only of a run with a budget"""
    budget: float = math.nan
    """the share that heads should compute"""
    choice_entropy: float = math.nan
    """bits of a query's choice of its key by hard attention, the mean of its layers"""
    choice_variance: float = math.nan
    """of the score-function gradient of such a choice, the mean of its layers"""
    depth: float = math.nan
    """mean layers of a token in the last step; NaN if every token runs through all"""


@dataclass(frozen=True)
class EvalEvent(Event):
    """An evaluation."""

    kind = "eval"
    seconds: float
    split: str
    loss: float
    """nats per token"""
    bits: float
    """per unit"""
    tokens: int
    exact: float = math.nan
    """share predicted exactly, of the targets of pairs or of masked tokens; NaN for other objectives"""
    depth: float = math.nan
    """mean layers of a token; NaN if every token runs through all"""


@dataclass(frozen=True)
class CostEvent(Event):
    """The measured cost of a step on one batch. Each dict has the keys "learned" (the model's attention) and "full"
    (full attention in its place), or is empty. Times are of a whole step and of its parts."""

    kind = "cost"
    flops: dict[str, float] = field(default_factory=dict)
    """of forward and backward"""
    step_seconds: dict[str, float] = field(default_factory=dict)
    attention_seconds: dict[str, float] = field(default_factory=dict)
    products_seconds: dict[str, float] = field(default_factory=dict)
    """seconds of matrix products outside attention"""
    optimizer_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    """tokens of the batch; 0: batch · block of the shape"""


@dataclass(frozen=True)
class DynamicEvent(Event):
    """How far heads with dynamic spans looked back at each character of a text."""

    kind = "dynamic"
    text: str
    spans: np.ndarray
    """[names, characters] spans in tokens"""
    names: list[str]
    """names of the heads"""


@dataclass(frozen=True)
class DepthEvent(Event):
    """How many layers, or steps of a universal stack, each character of a text took."""

    kind = "depth"
    text: str
    layers: list[int]
    """of each character"""
    most: int
    """all layers"""


@dataclass(frozen=True)
class NoteEvent(Event):
    """A sentence for the reader of the report."""

    kind = "note"
    text: str


@dataclass(frozen=True)
class SkipEvent(Event):
    """A step was skipped because its loss or gradient was not finite, or its loss was a spike."""

    kind = "skip"
    reason: str


@dataclass(frozen=True)
class CheckpointEvent(Event):
    """A checkpoint was saved."""

    kind = "checkpoint"
    path: str


@dataclass(frozen=True)
class StopEvent(Event):
    """The run ends."""

    kind = "stop"
    reason: str
    seconds: float
    """seconds of training steps since the start of the run"""


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of work other than training steps. Sent to watchers, not written to the file."""

    title: str
    done: float
    total: float
    """0: unknown"""


@dataclass(frozen=True)
class StepsEvent:
    """Number of finished steps, after each step. Sent to watchers, not written to the file."""

    step: int
    seconds: float
    """seconds of training steps since the start of the run"""


Watch = Callable[[Event | ProgressEvent | StepsEvent], None]


def as_record(event: Event) -> dict[str, Any]:
    """The JSON object of a row, without its time. Optional numbers that are NaN are omitted."""
    assert isinstance(event, Event), f"{type(event).__name__} has no place in a file"
    found: dict[str, Any] = {"event": event.kind}
    for each in fields(event):
        value = getattr(event, each.name)
        missing = isinstance(each.default, float) and math.isnan(each.default) and value != value
        if each.name != "time" and not missing:
            found[each.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """The value in JSON types: lists for arrays, None for numbers that are not finite."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value
