"""The folder of a run: new or resumed, and locked by one process at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from spanformer.core.events import FILE
from spanformer.core.lock import LOCK_FILE, FolderInUse, lock_folder

BOARD = "tensorboard"
UNLOCKED = "the file system has no locks: make sure that no other process writes into this folder"


@contextlib.contextmanager
def claim_folder(out: Path, *, resume: bool) -> Iterator[bool]:
    """Create and lock the folder. A folder with files is accepted only with `resume`, and a folder locked by another
    process never. Yields whether it is locked: some file systems have no locks.

    Writes nothing else: a run that fails before it starts leaves the folder free for the next attempt.
    """
    with hold_folder(out) as locked:
        if not resume and any(path.name != LOCK_FILE for path in out.iterdir()):
            raise ValueError(f"{out} exists already; continue the run in it with --resume, or choose another --out")
        yield locked


@contextlib.contextmanager
def hold_folder(out: Path) -> Iterator[bool]:
    """Create the folder if needed and lock it against other processes that write a run, a comparison or a fit."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the run, choose another --out")
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            locked = stack.enter_context(lock_folder(out))
        except FolderInUse as error:
            raise FolderInUse(f"{error}, or choose another --out") from None
        except OSError as error:
            raise ValueError(f"{out} cannot be made or read ({error.strerror}); choose another --out") from None
        yield locked


def put_aside(out: Path) -> Path | None:
    """Move the files of a run that ended before its first checkpoint to a subfolder, so that they do not mix with those
    of the new run; returns that folder, or None if there were no files."""
    left = [out / name for name in (FILE, BOARD) if (out / name).exists()]
    if not left:
        return None
    aside = next(path for n in itertools.count(1) if not (path := out / f"before-{n}").exists())
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    return aside
