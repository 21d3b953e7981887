"""Atomic writes of files and folders: write to a hidden folder beside the target, flush to disk, rename into place.

    .NAME.1a2b3c4d.new    the folder being written, beside NAME; its writer holds a lock on it
    .NAME.1a2b3c4d.old    the previous NAME, while the new one replaces it

A lock ends with its process, also after SIGKILL. The next writer removes the leftovers of a killed one, or restores the
previous folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from spanformer.core.lock import take_lock

_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.(?P<state>new|old)")


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, in a hidden folder beside `path`. If the block succeeds, that file replaces `path`. If
    it raises, `path` is unchanged and the hidden folder is removed. Pipes and devices are written directly."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    with hidden_folder(path) as folder:
        new = folder / path.name  # keep the name: matplotlib and others choose the format by the suffix
        new.touch()
        mode = new.stat().st_mode & 0o777
        yield new
        new.chmod(mode)  # some writers, such as safetensors, create files that only the owner can read
        put_file(new, path)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with replace_file(path) as new:
        new.write_text(text, encoding="utf-8")


def put_file(new: Path, path: Path) -> None:
    """Flush a complete file to disk and rename it to `path`, replacing any file there."""
    sync(new)
    new.replace(path)
    sync(path.parent)


@contextlib.contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`: fill it and call `put_folder`, or rename files out of it. Whatever is left is removed
    when the block ends.

    The folder is locked rather than its files, because libraries may replace files (safetensors does).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, re.escape(path.name))
    new, descriptor = _make(path)
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def put_folder(new: Path, path: Path, *, replace: bool = False) -> None:
    """Rename a hidden folder, whose files are already flushed, to `path`. With `replace`, an existing folder is removed
    after the rename; without, an existing folder must be empty."""
    sync(new)
    if not (replace and path.exists()):
        new.rename(path)
        sync(path.parent)
        return
    old = _hidden_path(path, "old")
    with contextlib.ExitStack() as held:
        descriptor = _open(path)
        if descriptor is not None:
            held.callback(os.close, descriptor)
            take_lock(descriptor)  # so that no sweep removes it between the two renames
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
        sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Rename a folder, then delete it, so that no reader sees it half deleted."""
    away = _hidden_path(path, "new")
    path.rename(away)
    shutil.rmtree(away, ignore_errors=True)


def sweep(parent: Path, names: str = ".+") -> None:
    """Clean up after killed writers in `parent`, for paths whose names match a regular expression."""
    for left in list(parent.iterdir()):
        found = _NAME.fullmatch(left.name)
        if found is None or not re.fullmatch(names, found["name"]) or not left.is_dir() or left.is_symlink():
            continue
        with contextlib.suppress(OSError):  # another process removed it first, or permission is denied
            descriptor = os.open(left, os.O_RDONLY)
            try:
                if not take_lock(descriptor):  # its writer is alive, or there are no locks
                    continue
                if found["state"] == "old" and not (parent / found["name"]).exists():
                    left.rename(parent / found["name"])  # killed between the two renames of put_folder
                else:
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's names, so that a rename survives a power cut."""
    descriptor = _open(path)
    if descriptor is not None:
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return None  # Windows cannot open a folder
        raise


def _hidden_path(path: Path, state: Literal["new", "old"]) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{state}")


def _make(path: Path) -> tuple[Path, int | None]:
    """A locked folder, and the descriptor that holds the lock."""
    while True:
        new = _hidden_path(path, "new")
        new.mkdir()
        try:
            descriptor = _open(new)
        except FileNotFoundError:
            continue  # another process swept it before it was locked
        if descriptor is None:
            return new, None
        if take_lock(descriptor) is not False and new.is_dir():
            return new, descriptor
        os.close(descriptor)
