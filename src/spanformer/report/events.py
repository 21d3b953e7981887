"""A training run, read back from its event file: one JSON object per line, in order of time.

A run that was killed and resumed wrote some steps twice. The steps after the checkpoint were undone, so
their rows are dropped, and of two rows of one step the later counts. A kill may also leave an incomplete
line at the end or before the resumption, which is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from spanformer.core.events import (
    FILE,
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
from spanformer.core.paths import check_regular
from spanformer.core.policy_events import ImitationStartEvent, PolicyStartEvent
from spanformer.core.text import printable
from spanformer.report.rows import Line, read_row, read_start

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Run:
    """All valid rows of a run, each kind in the order of its steps."""

    path: Path
    name: str
    """the name to show; `read_runs` makes equal names distinct"""
    start: StartEvent
    steps: list[StepEvent]
    evals: list[EvalEvent]
    costs: list[CostEvent]
    notes: list[NoteEvent]
    skips: list[SkipEvent]
    checkpoints: list[CheckpointEvent]
    dynamics: list[DynamicEvent]
    depths: list[DepthEvent]
    resumes: list[ResumeEvent]
    stop: StopEvent | None


def read_run(path: Path) -> Run:
    """A run from its folder or its event file; raises a ValueError for anything else."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    lines = _lines(file)
    first = next(lines, None)
    if first is not None and first.record.get("event") in (PolicyStartEvent.kind, ImitationStartEvent.kind):
        raise ValueError(f"{file} is the run of a policy; draw it with: spanformer rl report {file.parent}")
    if first is None or first.record.get("event") != StartEvent.kind:
        raise ValueError(f"{file} does not begin with a start event; expected the {FILE} of a training run")
    begun = read_start(first)
    rows: dict[tuple, Event] = {}
    for line in lines:
        if line.record.get("event") == StartEvent.kind:
            raise ValueError(f"{line.where} starts a second run; expected one run in a file")
        found = read_row(line, begun.shape)
        if isinstance(found, ResumeEvent):
            rows = {key: old for key, old in rows.items() if old.step <= found.step and not isinstance(old, StopEvent)}
        if found is not None:
            key = _key(found)
            rows.pop(key, None)
            rows[key] = found
    kept = sorted(rows.values(), key=lambda each: each.step)
    return Run(
        path=file, name=printable(begun.run), start=begun, steps=_of(StepEvent, kept), evals=_of(EvalEvent, kept),
        costs=_of(CostEvent, kept), notes=_of(NoteEvent, kept), skips=_of(SkipEvent, kept),
        checkpoints=_of(CheckpointEvent, kept), dynamics=_of(DynamicEvent, kept),
        depths=_of(DepthEvent, kept), resumes=_of(ResumeEvent, kept),
        stop=next(iter(_of(StopEvent, kept)), None),
    )  # fmt: skip


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Several runs; runs with the same name are named by the shortest distinct ends of their paths."""
    runs = [read_run(Path(path)) for path in paths]
    names = [run.name for run in runs]
    places = [_place(run.path) for run in runs]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise ValueError(f"{paths[at]} is named twice; expected each run once")
        if names.count(names[at]) > 1:
            others = [*places[:at], *places[at + 1 :]]
            runs[at] = replace(runs[at], name=_own_end(place, others, names))
    return runs


def _place(file: Path) -> Path:
    file = file.resolve()
    return file.parent if file.name == FILE else file


def _own_end(place: Path, others: Sequence[Path], names: Sequence[str]) -> str:
    """The shortest end of a path that no other path ends with, and that is no run's name."""
    for count in range(1, len(place.parts)):
        end = place.parts[-count:]
        name = printable(Path(*end))
        if name not in names and not any(other.parts[-count:] == end for other in others):
            return name
    return printable(place)


def _key(found: Event) -> tuple:
    """Two rows with the same key are one event; the later replaces the earlier."""
    if isinstance(found, StopEvent):
        return (StopEvent,)
    more = found.split if isinstance(found, EvalEvent) else found.text if isinstance(found, NoteEvent) else ""
    return type(found), found.step, more


def _of(kind: type[Kind], rows: list) -> list[Kind]:
    return [each for each in rows if isinstance(each, kind)]


def _lines(file: Path) -> Iterator[Line]:
    """Every complete line of the file as an object."""
    check_regular(file, "the file of events")
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{file} does not exist; expected a training run's folder or its {FILE}") from None
    except IsADirectoryError:
        raise ValueError(f"{file} is a folder; expected the {FILE} of a training run") from None
    if not content.strip():
        raise ValueError(f"{file} is empty; expected the {FILE} of a training run")
    raw = content.split(b"\n")
    broken = None  # a line that is not JSON, ignored if it is the last or a resumption follows
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            if broken is None and number == len(raw):
                return
            if broken is not None:
                break
            broken = f"{file}, line {number}"
            continue
        line = Line(record, f"{file}, line {number}")
        if not isinstance(record, dict):
            raise ValueError(f"{line.where} is JSON but not an object; expected one event")
        if broken is not None and record.get("event") != ResumeEvent.kind:
            break
        broken = None
        yield line
    if broken is not None:
        raise ValueError(f"{broken} is not JSON; expected one event per line")
