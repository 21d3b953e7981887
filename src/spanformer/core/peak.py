"""Peak memory of this process on Linux: the highest resident set since a reset (VmHWM after writing 5 to
clear_refs)."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable

from spanformer.core.malloc import keep_freed_memory


def unsupported() -> str | None:
    """Why peaks cannot be measured here; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"peak memory is read from /proc, which {sys.platform} does not have"
    try:
        _reset_peak()
        resident_bytes()
        _status("VmHWM")
    except (OSError, StopIteration) as error:
        return f"this system does not report peak memory: {error}"
    return None


def peak_of(function: Callable[[], object]) -> tuple[float, float]:
    """(bytes, seconds) of one call in this process: its peak resident memory above that before the call.

    Switches `keep_freed_memory` off: freed memory is returned to the system.
    """
    keep_freed_memory(False)
    gc.collect()
    _give_back()
    before = resident_bytes()
    _reset_peak()
    start = time.perf_counter()
    kept = function()
    seconds = time.perf_counter() - start
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before), seconds


def resident_bytes() -> int:
    return _status("VmRSS")


def _give_back() -> None:
    """Return freed memory to the system: memory that the C library keeps would hide what the next call allocates."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
