"""File locks that the kernel releases when their process ends, also after SIGKILL.

flock(2) locks an open file. NFS passes locks on to its server (Linux 2.6.12 or newer), so they work between machines;
mounted with `nolock` or `local_lock`, they work on one machine only. If the file system or Python (Windows) has no
locks, nothing is locked, and `take_lock` returns None.
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
    """Lock an open file or folder until it is closed. Returns False if another process holds the lock (never with
    `wait`), None if locks are not available."""
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
    """Lock a folder, so that only one process writes into it; FolderInUse names the process that holds the lock. Yields
    whether the folder is locked: False if locks are not available.

    The file .lock in the folder names the holder. Another process may remove it (this function does so at its end)
    between our opening and locking it, so a lock is valid only if the file is still at that path.
    """
    path = folder / LOCK_FILE
    while True:
        # the folder may be untrusted: do not follow a link in it, which would truncate another file
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
                    path.unlink()  # remove it while we still hold the lock
            return
        finally:
            os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sign(descriptor: int) -> None:
    """Write the holder of the lock into the file, for users and for `_holder`."""
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    text = json.dumps({"process": os.getpid(), "host": platform.node(), "since": now}) + "\n"
    os.ftruncate(descriptor, 0)
    os.write(descriptor, text.encode())


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.read(descriptor, 4096))
        return f"process {int(found['process'])} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # the holder has not written its name yet
        return "another process"
