"""How long work reports how far it is: to a callback that its caller passes, and to nobody otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

OnProgress = Callable[[str, float, float], None]
"""takes what is being done, how much of it is done, and how much there is (0 where nobody knows)"""

OnCount = Callable[[int, int], None]
"""takes how much is done, and how much there is, of work whose caller knows what it is"""


def silent(_what: str, _done: float, _total: float) -> None:
    """For callers that did not ask."""


class Meter:
    """Reports the bytes that pass through it."""

    def __init__(self, what: str, total: int, on_progress: OnProgress) -> None:
        self.what, self.done, self.total, self.on_progress = what, 0, total, on_progress

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            self.done += len(chunk)
            self.on_progress(self.what, self.done, self.total)
