"""One process at a time writes into a folder of runs; the second is refused, and told which process does."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from spanformer.cli.main import main
from spanformer.core.lock import LOCK_FILE, lock_folder
from spanformer.report.events import read_run
from spanformer.train.remeasure import measure_again
from spanformer.train.run import train
from spanformer.train.run_folder import UNLOCKED
from support.killing import start
from support.tiny_runs import options, tiny


def refusal(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_living_run_refuses_a_second_process_and_a_killed_one_is_resumed(tmp_path: Path, capsys) -> None:
    living = start(["train", *options(tmp_path, {"train.steps": 1_000_000})], tmp_path / "screen.txt")
    try:
        while not (tmp_path / "run" / "checkpoints" / "step-00000003").exists():
            assert living.is_alive(), (tmp_path / "screen.txt").read_text()
            time.sleep(0.02)
        os.kill(living.pid, signal.SIGSTOP)  # so that only the second could change the folder
        before = content(tmp_path / "run")
        for resume in ([], ["--resume"]):
            said = refusal(["train", *options(tmp_path), *resume], capsys)
            assert said.startswith(f"spanformer: {tmp_path / 'run'} is in use by process {living.pid} on ")
            assert said.endswith("; wait until it ends, or stop it, or choose another --out")
            assert content(tmp_path / "run") == before
    finally:
        living.kill()
        living.join()
    assert train(tiny(tmp_path, {"resume": True, "train.steps": 3})).steps >= 3
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_lock_file_of_a_killed_run_that_wrote_nothing_leaves_the_folder_free(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK_FILE).write_text('{"process": 1}')
    assert train(tiny(tmp_path, {"train.steps": 1})).steps == 1


def test_comparison_sweep_fit_and_measurement_refuse_a_folder_in_use(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    out.mkdir()
    run = options(tmp_path)
    commands = (
        ["compare", *run, "--kinds", "full", "window(4)"],
        ["sweep", *run, "--limits", "8"],
        ["fit-spans", "no-model", "--data", str(tmp_path), "--out", str(out)],
    )
    with lock_folder(out):
        for command in commands:
            assert f"{out} is in use by process {os.getpid()} on " in refusal(command, capsys), command[0]
        with pytest.raises(ValueError, match=f"{out} is in use by process {os.getpid()} on "):
            measure_again(tiny(tmp_path), 3)
    assert not list(out.iterdir())


def test_run_where_nothing_can_be_locked_says_so(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    train(tiny(tmp_path, {"train.steps": 1}))
    assert UNLOCKED in [note.text for note in read_run(tmp_path / "run").notes]
