"""The event log: every row survives a kill, half a row does not, and JSON stays JSON."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanformer.core.events import (
    CheckpointEvent,
    EvalEvent,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    StepEvent,
    StopEvent,
)
from spanformer.train.event_log import EventLog


def step(number: int, loss: float = 1.0, **more: Any) -> StepEvent:
    given: dict[str, Any] = {"spans": np.zeros((1, 2)), "reach": np.ones((1, 2), dtype=int)} | more
    return StepEvent(
        number, seconds=1.0, tokens=9, loss=loss, penalty=0.0, lr=float("nan"), grad_norm=1.0, tokens_per_second=1.0,
        memory=[], **given,
    )  # fmt: skip


def rows(path: Path) -> list[dict]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_are_on_the_file_at_once_and_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    with EventLog(path, None) as log:
        log.write(NoteEvent(0, "ä\n"))
        first = rows(path)
        log.write(step(1, 2.5))
    assert len(first) == 1 and first[0]["event"] == "note" and first[0]["step"] == 0
    assert first[0]["text"] == "ä\n" and abs(first[0]["time"] - path.stat().st_mtime) < 60
    with EventLog(path, None) as log:
        log.write(ResumeEvent(1, "step-00000001"))
    assert [row["event"] for row in rows(path)] == ["note", "step", "resume"]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    with EventLog(path, None) as log:
        log.write(step(1, float("nan"), spans=np.array([[1.0, float("inf")], [float("-inf"), float("nan")]])))
    (row,) = rows(path)
    assert row["loss"] is None and row["spans"] == [[1.0, None], [None, None]] and row["tokens"] == 9
    assert "bits" not in row  # an optional number that is not there


@pytest.mark.parametrize("left", ["", '{"event": "step", "ste', "x" * 200_000])
@pytest.mark.parametrize("full", ["", '{"a": 1}\n', '{"a": 1}\n' * 20_000])
def test_incomplete_last_line_is_removed(tmp_path: Path, full: str, left: str) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(full + left)
    EventLog(path, None).close()
    assert path.read_text() == full


def test_killed_process_loses_no_row(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    pid = os.fork()
    if pid == 0:
        log = EventLog(path, None)
        for number in range(5):
            log.write(step(number))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3, 4]


def test_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EventLog(path, None) as log:
        log.write(NoteEvent(0, "short"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
        try:
            with pytest.raises(OSError) as error:
                log.write(NoteEvent(0, "longer than the room that is left"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert str(error.value) == f"{path} cannot be written (File too large); make room and resume the run"
        log.write(StopEvent(1, "full", 1.0))
    assert [row["event"] for row in rows(path)] == ["note", "stop"]


def test_unwritable_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"cannot be written \({os.strerror(errno.EISDIR)}\); choose another folder$"):
        EventLog(tmp_path, None)


def test_watcher_only_events_are_not_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "e.jsonl", None) as log, pytest.raises(AssertionError, match="ProgressEvent"):
        log.write(ProgressEvent("encoding", 1, 2))  # pyright: ignore[reportArgumentType]
    assert (tmp_path / "e.jsonl").read_text() == ""


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return {tag: [(s.step, s.value) for s in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with EventLog(tmp_path / "a" / "e.jsonl") as log:
        log.write(CheckpointEvent(0, "a"))
        for number in (1, 2, 3):
            log.write(step(number, number / 2, span_average=7))
        log.write(EvalEvent(3, 1.0, "dev", loss=1.0, bits=1.5, tokens=9))
    with EventLog(tmp_path / "a" / "e.jsonl") as log:
        log.write(ResumeEvent(2, "a"))
        log.write(step(3, 8.0))
    found = scalars(tmp_path / "a" / "tensorboard")
    assert found["step/loss"] == [(1, 0.5), (2, 1.0), (3, 8.0)]  # what happened after the checkpoint is gone
    assert set(found) <= {"step/loss", "step/grad_norm", "step/span_average", "eval/loss", "eval/bits"}
    with EventLog(tmp_path / "b.jsonl", tmp_path / "board") as log:
        log.write(EvalEvent(4, 1.0, "dev", loss=float("nan"), bits=2.0, tokens=9))
    assert scalars(tmp_path / "board") == {"eval/bits": [(4, 2.0)]}


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with EventLog(tmp_path / "e.jsonl") as log:
        log.write(step(1))
    assert not (tmp_path / "tensorboard").exists()
    with pytest.raises(ImportError, match=r"tensorboard is not installed; .* pip install 'spanformer\[tensorboard\]'"):
        EventLog(tmp_path / "e.jsonl", tmp_path / "board")
