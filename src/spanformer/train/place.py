"""The folder of a run: taken when nothing is in it, or continued in; by one process at a time."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from spanformer.core.lock import LOCK_FILE, FolderInUse, lock_folder

EVENTS = "events.jsonl"
BOARD = "tensorboard"
UNLOCKED = "the file system has no locks: make sure that no other process trains into this folder"


@contextlib.contextmanager
def claim_folder(out: Path, *, resume: bool) -> Iterator[bool]:
    """Make the folder and hold it; one that holds something is taken only to continue the run in it, and one that
    another process holds never. Yields whether it is locked, which some file systems cannot.

    Nothing else is put into it yet: a run that fails before it begins leaves the folder free for the next try.
    """
    with hold_folder(out) as locked:
        if not resume and any(path.name != LOCK_FILE for path in out.iterdir()):
            raise ValueError(f"{out} exists already; continue the run in it with --resume, or choose another --out")
        yield locked


@contextlib.contextmanager
def hold_folder(out: Path) -> Iterator[bool]:
    """Make the folder if it is not there, and let no other process write a run, a comparison or a fit into it."""
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
    """Move away what a run wrote that ended before its first checkpoint, so that it does not mix with the run that
    begins anew; returns where to, or None if there was nothing."""
    left = [out / name for name in (EVENTS, BOARD) if (out / name).exists()]
    if not left:
        return None
    aside = next(path for n in itertools.count(1) if not (path := out / f"before-{n}").exists())
    aside.mkdir()
    for path in left:
        path.rename(aside / path.name)
    return aside
