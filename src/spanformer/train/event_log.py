"""Writes events.jsonl, one row per event (core/events.py) and the only input of reports; optionally TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

from spanformer.core.events import (
    EvalEvent,
    Event,
    ResumeEvent,
    StepEvent,
    as_record,
)
from spanformer.core.policy_events import ImitateEvent, PlayEvent, UpdateEvent

SCALARS = (
    "loss",
    "bits",
    "exact",
    "lr",
    "grad_norm",
    "span_average",
    "span_longest",
    "choice_entropy",
    "choice_variance",
    "episode_return",
    "success",
    "length",
    "policy_loss",
    "value_loss",
    "entropy",
    "kl",
    "steps_per_second",
)
"""Fields of `step`, `eval`, `update`, `play` and `imitate` rows for TensorBoard, as step/loss, eval/loss, …"""


class EventLog:
    """Appends rows to `path`. `write` is unbuffered, so a killed process loses no row.

    `tensorboard`: folder for scalars, which needs the package; "auto": beside `path` if the package is installed;
    None: no scalars. An incomplete last line, left by a killed run, is removed.
    """

    def __init__(self, path: Path, tensorboard: Path | Literal["auto"] | None = "auto") -> None:
        self.path = path
        self._make_board = _board_maker(path, tensorboard)
        self._board = None
        self._resumed: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (close() closes it)
            self._file.truncate(_end_of_last_line(self._file))
        except OSError as error:
            raise OSError(f"{path} cannot be written ({error.strerror}); choose another folder") from error

    def write(self, event: Event) -> None:
        """Append one row."""
        record = as_record(event)
        row = {"event": record.pop("event"), "time": round(time.time(), 3), **record}
        line = memoryview(json.dumps(row, allow_nan=False).encode() + b"\n")
        start = self._file.seek(0, 2)
        try:
            while line:  # a full disk may accept only a part
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(start)
            raise OSError(f"{self.path} cannot be written ({error.strerror}); make room and resume the run") from error
        self._show(event, row)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, event: Event, row: dict[str, Any]) -> None:
        if self._make_board is None:
            return
        if isinstance(event, ResumeEvent):
            self._resumed = event.step
        if not isinstance(event, StepEvent | EvalEvent | UpdateEvent | PlayEvent | ImitateEvent):
            return
        if self._board is None:
            self._board = self._make_board(self._resumed)
        for name in SCALARS:
            if row.get(name) is not None:
                self._board.add_scalar(f"{event.kind}/{name}", row[name], event.step)


def _board_maker(path: Path, tensorboard: Path | Literal["auto"] | None) -> Callable | None:
    """A function (steps at resume) → TensorBoard writer, called at the first scalar; None without TensorBoard."""
    if tensorboard is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        if tensorboard == "auto":
            return None
        raise ImportError(
            "train.tensorboard is 'on', but tensorboard is not installed; install it with: "
            "pip install 'spanformer[tensorboard]', or leave train.tensorboard at 'auto'"
        ) from error
    folder = path.parent / "tensorboard" if tensorboard == "auto" else tensorboard
    # Hide scalars of later steps, written before the run went back to a checkpoint.
    return lambda resumed: SummaryWriter(str(folder), purge_step=None if resumed is None else resumed + 1)


def _end_of_last_line(file: BinaryIO, chunk: int = 1 << 16) -> int:
    """Offset of the end of the last complete line, searched backwards from the end of the file."""
    end = file.seek(0, 2)
    while end:
        start = max(0, end - chunk)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
