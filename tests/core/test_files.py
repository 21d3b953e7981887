from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest

from spanformer.core.files import hidden_folder, put_folder, remove_folder, replace_file, sweep, write_text


def test_write_replaces_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


def test_failed_write_keeps_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replace_file(path) as new:
        assert new.suffix == ".png" and new.parent.parent == tmp_path
        new.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]


def test_replaced_file_has_ordinary_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with replace_file(tmp_path / "a") as new:
        new.chmod(0o600)
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_write_removes_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if not (child := os.fork()):
        with replace_file(path) as new:
            new.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1 and not path.exists()
    write_text(tmp_path / "b.json", "of another name")
    assert len(list(tmp_path.iterdir())) == 2
    write_text(path, "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_write_leaves_the_files_of_a_living_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replace_file(path) as first:
        first.write_text("first")
        write_text(path, "second")
        assert first.read_text() == "first" and path.read_text() == "second"
    assert path.read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def test_sweep_undoes_what_killed_writers_left(tmp_path: Path) -> None:
    folder(tmp_path / ".a.01234567.old", "a")  # killed between the two renames of put_folder
    folder(tmp_path / "b", "b")
    folder(tmp_path / ".b.01234567.old", "older")  # killed after them
    for name in (".a.01234567.new", ".c.89abcdef.new", ".d.89abcdef.new", ".cache"):
        (tmp_path / name).mkdir()
    alive = os.open(tmp_path / ".d.89abcdef.new", os.O_RDONLY)
    fcntl.flock(alive, fcntl.LOCK_EX)
    sweep(tmp_path, "b")
    assert not (tmp_path / ".b.01234567.old").exists() and (tmp_path / ".a.01234567.old").exists()
    sweep(tmp_path)
    os.close(alive)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache", ".d.89abcdef.new", "a", "b"]
    assert [(tmp_path / name / "file").read_text() for name in "ab"] == ["a", "b"]


@pytest.mark.parametrize("replace", [False, True])
def test_put_folder_replaces_only_when_asked(tmp_path: Path, replace: bool) -> None:
    path = folder(tmp_path / "a", "old")
    with hidden_folder(path) as new:
        (new / "file").write_text("new")
        if replace:
            put_folder(new, path, replace=True)
        else:
            with pytest.raises(OSError):
                put_folder(new, path)
    assert (path / "file").read_text() == ("new" if replace else "old")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_removed_folder_leaves_nothing(tmp_path: Path) -> None:
    remove_folder(folder(tmp_path / "a", ""))
    assert list(tmp_path.iterdir()) == []
