"""Files that are written whole or not at all: write beside, flush to disk, rename into place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from spanformer.core.hidden import hidden_folder


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yields a path to write to, in a hidden folder beside `path`. When the block ends well, that file takes the place
    of `path`; when it fails, `path` stays as it was and nothing is left beside it. What a killed writer left is removed
    by the next one. A pipe or a device is written to as it is."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    with hidden_folder(path) as folder:
        new = folder / path.name  # the name stays: matplotlib and others choose a format by its suffix
        new.touch()
        mode = new.stat().st_mode & 0o777
        yield new
        new.chmod(mode)  # some writers, safetensors among them, make files for the owner alone
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with replace_file(path) as new:
        new.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to disk, so that a rename survives a power cut."""
    with contextlib.suppress(PermissionError):  # Windows cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
