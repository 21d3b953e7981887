"""Controls what the C library does with freed memory. Training allocates and frees large tensors in every step; memory
returned to the system would be paged in again each time."""

from __future__ import annotations

import ctypes


def keep_freed_memory(keep: bool) -> bool:
    """Let the C library keep freed memory, as jemalloc and tcmalloc do, or return it. Returns whether it is kept."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim, mmaps = (2**31 - 1, 0) if keep else (2**17, 2**16)  # the latter are its defaults
    set_trim, set_mmaps = mallopt(-1, trim), mallopt(-4, mmaps)  # M_TRIM_THRESHOLD, M_MMAP_MAX of malloc.h
    return keep and bool(set_trim and set_mmaps)
