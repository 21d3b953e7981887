"""Hidden folders to write in before a rename: gone when the writer ends, or, if it was killed, at the next writing."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from spanformer.core.lock import take_lock

_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.new")


def hidden_path(path: Path) -> Path:
    """A name beside `path` that nobody has; `sweep` takes what is there and held by nobody."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")


@contextlib.contextmanager
def hidden_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, to be filled and renamed, or to rename files out of; what is left of it is removed.

    It is locked meanwhile, and the lock ends with the process: what writers of the same `path` left behind when they
    were killed is removed first. A lock on the folder holds whatever a library does with the files in it; safetensors
    replaces them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    new, descriptor = _make(path)
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def sweep(parent: Path, name: str = "") -> None:
    """Remove hidden folders in `parent` whose writers were killed; name: only those made for this name."""
    for left in list(parent.iterdir()):
        found = _NAME.fullmatch(left.name)
        if found is None or name not in ("", found["name"]) or not left.is_dir() or left.is_symlink():
            continue
        with contextlib.suppress(OSError):  # somebody else was quicker, or it is not ours to remove
            descriptor = os.open(left, os.O_RDONLY)
            try:
                if take_lock(descriptor):  # None: nobody can tell whether its writer lives
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


def _make(path: Path) -> tuple[Path, int | None]:
    """A locked folder, and the descriptor that holds the lock."""
    while True:
        new = hidden_path(path)
        new.mkdir()
        try:
            descriptor = os.open(new, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process swept it in the moment before it was locked
        except PermissionError:
            return new, None  # Windows cannot open a folder
        if take_lock(descriptor) is not False and new.is_dir():
            return new, descriptor
        os.close(descriptor)
