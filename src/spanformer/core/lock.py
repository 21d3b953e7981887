"""Locks that end with the process that holds them, however it ends: the kernel gives them back, also after SIGKILL.

flock(2) locks an open file. Network file systems differ: NFS passes locks on to its server (Linux 2.6.12 or newer),
so they hold between machines, unless it is mounted with `nolock` or `local_lock`; then they hold on one machine. Where
a file system refuses them, or Python has none (Windows), nothing is locked, and `take_lock` says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

LOCK_FILE = ".lock"


class FolderInUse(ValueError):
    """Another process writes into the folder."""


def take_lock(descriptor: int, *, wait: bool = False) -> bool | None:
    """Lock an open file or folder, until it is closed. False: another process holds the lock (with `wait`, never).
    None: there are no locks here."""
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Hold a folder, so that one process at a time writes into it; FolderInUse names the one that does. Yields whether
    it is locked: False where there are no locks.

    The file .lock in it says who holds it. Somebody may remove the file (this function does, at its end) between our
    opening and locking it; a lock counts only if the file is still the one at that path.
    """
    path = folder / LOCK_FILE
    while True:
        # a folder may be from elsewhere: a link in it must not have another file truncated
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            taken = take_lock(descriptor)
            if taken is False:
                raise FolderInUse(f"{folder} is in use by {_holder(descriptor)}; wait until it ends, or stop it")
            if not _is_at(path, descriptor):
                continue
            _sign(descriptor)
            try:
                yield taken is True
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()  # while we hold it, so it is ours
            return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write who holds the lock, for people and for `_holder`."""
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    text = json.dumps({"process": os.getpid(), "host": platform.node(), "since": now}) + "\n"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, text.encode())


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.read(descriptor, 4096))
        return f"process {int(found['process'])} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # it has not signed yet
        return "another process"
