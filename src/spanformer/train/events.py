"""What happened in a run, one JSON object per line in `events.jsonl`: all that a report reads.

Every row has `event` and `time` (seconds since 1970). A number that is not finite is null. By event:

    start       a run begins: config, parameters, versions, machine
    resume      it goes on from a checkpoint: step, path, unit, seconds. Rows above it with a later step are void: they
                happen again
    step        after some optimiser steps: step, loss (nats), bits, penalty, lr, grad_norm, span_average, span_longest,
                spans (by layer and head), tokens, tokens_per_second
    eval        an evaluation: step, split, loss, bits, and exact where there is something to be exactly right
    cost        step, the tokens of a batch, and what a step with it costs, with the model's attention ("learned") and
                with full attention ("full"): flops of forward and backward; step_seconds of a whole step, and parts of
                it: attention_seconds, products_seconds (of matrices elsewhere), optimizer_seconds; peak_bytes
    dynamic     a text, and how far each head looked back at each of its characters: text, spans, names
    note        something worth a sentence: text
    skip        a step that was left out because its loss or gradient was not finite: step, reason
    checkpoint  one was saved: step, path
    stop        the run ends: step, reason

A row may hold further keys; a reader takes those it knows.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

EVENTS = ("start", "resume", "step", "eval", "cost", "dynamic", "note", "skip", "checkpoint", "stop")
SCALARS = ("loss", "bits", "exact", "lr", "grad_norm", "span_average", "span_longest")
"""What TensorBoard is given of `step` and `eval` rows, as step/loss, eval/loss, …"""


class EventLog:
    """Appends rows to `path`; a row has left the process when `write` returns, so that a kill loses none.

    `tensorboard` is a folder for scalars, which needs the package; "auto" makes it beside `path` if the package is
    there; None has none. A half-written last line, of a run that was killed, is taken away.
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

    def write(self, event: str, row: dict) -> None:
        """Append one row; `event` is one of EVENTS."""
        assert event in EVENTS and not {"event", "time"} & set(row)
        whole = _finite({"event": event, "time": round(time.time(), 3), **row})
        line = memoryview(json.dumps(whole, allow_nan=False).encode() + b"\n")
        start = self._file.seek(0, 2)
        try:
            while line:  # a full disk may take a part of it
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(start)
            raise OSError(f"{self.path} cannot be written ({error.strerror}); make room and resume the run") from error
        self._show(event, whole)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _show(self, event: str, row: dict) -> None:
        if self._make_board is None:
            return
        if event == "resume":
            self._resumed = row["step"]
        if event not in ("step", "eval"):
            return
        if self._board is None:
            self._board = self._make_board(self._resumed)
        for name in SCALARS:
            if row.get(name) is not None:
                self._board.add_scalar(f"{event}/{name}", row[name], row["step"])


def _board_maker(path: Path, tensorboard: Path | Literal["auto"] | None) -> Callable | None:
    """Makes a TensorBoard writer, when it is first needed, for a run that resumed after so many steps, or None."""
    if tensorboard is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        if tensorboard == "auto":
            return None
        raise ImportError(
            "train.tensorboard is 'on', and tensorboard is not installed; install it with: "
            "pip install 'spanformer[tensorboard]', or leave train.tensorboard at 'auto'"
        ) from error
    folder = path.parent / "tensorboard" if tensorboard == "auto" else tensorboard
    # What was drawn of later steps, before a run went back to a checkpoint, is hidden.
    return lambda resumed: SummaryWriter(str(folder), purge_step=None if resumed is None else resumed + 1)


def _end_of_last_line(file: BinaryIO, chunk: int = 1 << 16) -> int:
    """Where the last full line ends, looked for from the end of the file."""
    end = file.seek(0, 2)
    while end:
        start = max(0, end - chunk)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    """With None for every number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value
