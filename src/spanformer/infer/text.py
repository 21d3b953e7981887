"""Between tokens and text while it is being written: pieces of text, and where to stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np


class Decoder(Protocol):
    def add(self, token: int) -> str: ...
    def finish(self) -> str: ...


class Vocabulary(Protocol):
    """What generation needs of a vocabulary; those of `spanformer.data` have it."""

    size: int

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]: ...
    def decoder(self, before: Iterable[int] = ()) -> Decoder: ...


class Writer:
    """Tokens to text, up to the first of the stop strings, which is left out.

    What may be the beginning of a stop string waits until that is known. A token costs the length of the stop strings,
    however long the text has become.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str]) -> None:
        self._decoder, self._stop = decoder, tuple(stop)
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        return "" if self._decoder is None else self._cut(self._decoder.add(token), False)

    def finish(self) -> str:
        """What is still waiting, when no token follows."""
        return "" if self._decoder is None or self.stopped else self._cut(self._decoder.finish(), True)

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
    """How many of the text's last characters begin the stop string."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


def check_stop(stop: Sequence[str], vocab: Vocabulary | None) -> None:
    if isinstance(stop, str):
        raise ValueError(f"stop is the text {stop!r}; expected a list of texts, such as [{stop!r}]")
    if not all(stop):
        raise ValueError("one of the stop strings is empty, which would stop at once; expected some text")
    if stop and vocab is None:
        raise ValueError("stop strings need a vocabulary to compare texts by; give vocab as well")
