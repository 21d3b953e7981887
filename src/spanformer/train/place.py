"""The folder of a run: taken when nothing is in it, or continued in."""

from __future__ import annotations

import itertools
from pathlib import Path

EVENTS = "events.jsonl"
BOARD = "tensorboard"


def claim_folder(out: Path, *, resume: bool) -> None:
    """Make the folder; one that holds something is taken only to continue the run in it.

    Nothing is put into it yet: a run that fails before it begins leaves the folder free for the next try.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the run, choose another --out")
    try:
        if out.is_dir() and any(out.iterdir()) and not resume:
            raise ValueError(f"{out} exists already; continue the run in it with --resume, or choose another --out")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out} cannot be made or read ({error.strerror}); choose another --out") from None


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
