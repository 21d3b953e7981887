"""Locks of folders: one process at a time, named to the next, and gone with it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spanformer.core import lock
from spanformer.core.lock import LOCK_FILE, FolderInUse, lock_folder, take_lock

HOLD = """
import sys, time
from pathlib import Path
from spanformer.core.lock import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that holds tmp_path."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_held_folder_names_its_process_and_is_free_once_that_is_killed(tmp_path: Path, holder) -> None:
    with pytest.raises(FolderInUse, match=f"{tmp_path} is in use by process {holder.pid} on .+, since 2"):
        lock_folder(tmp_path).__enter__()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["process"] == holder.pid  # the file outlives it
    with lock_folder(tmp_path) as locked:
        assert locked and json.loads((tmp_path / LOCK_FILE).read_text())["process"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_held_folder_is_refused_within_one_process_and_freed_by_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_folder(tmp_path):
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} on "):
            lock_folder(tmp_path).__enter__()
        raise KeyError
    assert not list(tmp_path.iterdir())
    with lock_folder(tmp_path) as locked:
        assert locked


def test_holder_without_a_name_is_called_another_process(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        (tmp_path / LOCK_FILE).write_text("")
        with pytest.raises(FolderInUse, match="is in use by another process; wait"):
            lock_folder(tmp_path).__enter__()


def test_lock_of_a_file_that_was_removed_meanwhile_does_not_count(tmp_path: Path, monkeypatch) -> None:
    taken = []

    def remove_first(descriptor: int) -> bool | None:
        taken.append(descriptor)
        if len(taken) == 1:
            (tmp_path / LOCK_FILE).unlink()
        return take_lock(descriptor)

    monkeypatch.setattr(lock, "take_lock", remove_first)
    with lock_folder(tmp_path):
        monkeypatch.undo()
        assert len(taken) == 2
        with pytest.raises(FolderInUse):
            lock_folder(tmp_path).__enter__()


def test_link_in_place_of_the_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / LOCK_FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        lock_folder(tmp_path / "folder").__enter__()
    assert (tmp_path / "mine").read_text() == "mine"


def test_file_system_without_locks_says_so(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with lock_folder(tmp_path) as locked:
        assert locked is False
