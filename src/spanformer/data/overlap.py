"""Find passages of one text in another, by their tokens and not by the names of files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PART = 1 << 24  # tokens that are searched at a time


def found_in(text: np.ndarray, passages: Sequence[np.ndarray]) -> list[int]:
    """The passages [n] of tokens that occur in text [N], by their number."""
    longest = max(map(len, passages), default=0)
    missing, found = dict(enumerate(passages)), []
    for start in range(0, len(text), PART):
        part = text[start : start + PART + longest - 1]  # a passage may cross the end of a part
        data, size = part.tobytes(), part.dtype.itemsize
        here = [n for n, passage in missing.items() if _occurs(data, passage.astype(part.dtype).tobytes(), size)]
        found += here
        for n in here:
            del missing[n]
    return sorted(found)


def _occurs(data: bytes, passage: bytes, size: int) -> bool:
    """Whether the passage begins at a multiple of `size` bytes, the size of a token."""
    at = data.find(passage)
    while at >= 0 and at % size:
        at = data.find(passage, at + 1)
    return at >= 0
