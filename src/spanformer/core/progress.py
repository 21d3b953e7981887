"""Progress callbacks of long operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

OnProgress = Callable[[str, float, float], None]
"""receives (name of the work, amount done, total or 0 if unknown)"""

OnCount = Callable[[int, int], None]
"""receives (amount done, total)"""


def silent(_what: str, _done: float, _total: float) -> None:
    """The default callback, which does nothing."""


class Meter:
    """Reports the bytes that pass through it."""

    def __init__(self, what: str, total: int, on_progress: OnProgress) -> None:
        self.what, self.done, self.total, self.on_progress = what, 0, total, on_progress

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            self.done += len(chunk)
            self.on_progress(self.what, self.done, self.total)
