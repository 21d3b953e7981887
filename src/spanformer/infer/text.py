"""Streams generated tokens as text, and stops at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np


class Detokenizer(Protocol):
    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Vocabulary(Protocol):
    """The interface of a vocabulary for generation; those of `spanformer.data` implement it."""

    size: int

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]: ...
    def detokenizer(self, before: Iterable[int] = ()) -> Detokenizer: ...


class Writer:
    """Tokens to text, up to the first stop string, which is not included.

    Text that may begin a stop string is held back until that is decided. The cost per token depends on the length of
    the stop strings, not of the text.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Sequence[str]) -> None:
        self._detokenizer, self._stop = detokenizer, tuple(stop)
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        return "" if self._detokenizer is None else self._cut(self._detokenizer.add(token), False)

    def finish(self) -> str:
        """The text still held back, when no token follows."""
        return "" if self._detokenizer is None or self.stopped else self._cut(self._detokenizer.finish(), True)

    def _cut(self, new: str, last: bool) -> str:
        text = self._held + new
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        hold = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def check_stop(stop: Sequence[str], vocab: Vocabulary | None) -> None:
    if isinstance(stop, str):
        raise ValueError(f"stop is the string {stop!r}; expected a list of strings, such as [{stop!r}]")
    if not all(stop):
        raise ValueError("stop contains an empty string, which would stop at once; expected non-empty strings")
    if stop and vocab is None:
        raise ValueError("stop strings need a vocabulary; pass vocab as well")
