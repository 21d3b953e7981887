"""Downloads one file over http(s): resumable, checked, and renamed into place only when complete."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from spanformer.core.files import put_file
from spanformer.core.lock import take_lock
from spanformer.core.progress import OnProgress, silent

CHUNK = 1 << 18
TIMEOUT = 30  # seconds without a byte


def download(url: str, target: Path, *, digest: str = "", on_progress: OnProgress = silent) -> None:
    """Download `url` to `target` through target.part. `digest`: "md5:…" or "sha256:…" of the file, "" if unknown.

    Processes that download the same target at the same time wait for the first.
    """
    part = target.with_name(target.name + ".part")
    with one_process_at_a_time(target.with_name(target.name + ".lock")):
        if target.exists():
            return
        try:
            _fetch(url, part, on_progress)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise ValueError(
                f"{url} could not be downloaded ({reason}); try again (it continues where it stopped), "
                "or give a copy on disk with --data.from PATH"
            ) from error
        if digest and (found := digest_of(part, digest)) != digest:
            part.unlink()
            raise ValueError(f"{url} has {found}; expected {digest}, so the download was removed")
        put_file(part, target)


def digest_of(path: Path, like: str) -> str:
    """The digest of a file, "md5:…" or "sha256:…", by the algorithm of the digest `like`."""
    algorithm = like.partition(":")[0]
    with path.open("rb") as file:
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


def _fetch(url: str, part: Path, on_progress: OnProgress) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "spanformer"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        reply = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not have:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return  # it was already complete
        part.unlink()  # it belongs to another file
        return _fetch(url, part, on_progress)
    with reply:
        if reply.status == 206 and not reply.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise http.client.HTTPException(f"requested the bytes from {have} on, received others")
        have = have if reply.status == 206 else 0  # a server without range requests sends the whole file
        total = have + int(reply.headers.get("Content-Length", -have))
        with part.open("ab" if have else "wb") as file:
            while chunk := reply.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                on_progress(f"downloading {url}", have, total)
    if have < total:
        raise http.client.HTTPException(f"the connection ended after {have} of {total} bytes")


@contextlib.contextmanager
def one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Hold a lock, after waiting for it. Without file locks, does nothing."""
    with lock.open("w") as file:
        take_lock(file.fileno(), wait=True)
        yield
