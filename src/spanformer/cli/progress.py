"""Progress on standard error: a live bar in a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rich import progress as rich
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from spanformer.core.text import printable

INTERVAL = 8.0
"""seconds between two lines without a terminal; on a busy machine, still a line at least every ten seconds"""


@dataclass(frozen=True)
class Stage:
    """One piece of work, from its first report to its total."""

    title: str
    done: float = 0.0
    total: float = 0.0
    """0: unknown"""
    began: float = 0.0
    """clock time of the start of the stage"""
    first: float = 0.0
    """amount done at the start of the stage"""
    reported: float = 0.0
    """clock time of the last report"""

    def left(self, now: float) -> float | None:
        """Estimated seconds left, from the pace until the last report; None without a pace, or if the work is
        overdue."""
        if not self.total or self.done <= self.first:
            return None
        pace = (self.reported - self.began) / (self.done - self.first)
        left = pace * (self.total - self.done) - (now - self.reported)
        return left if left >= 0 else None

    def times(self, now: float) -> str:
        left = self.left(now)
        return duration(now - self.began) + ("" if left is None else f", about {duration(left)} left")

    def line(self, now: float) -> str:
        share = [f"{100 * self.done / self.total:.0f} %"] if self.total else []
        return " · ".join([self.title, *share, self.times(now)])


class Progress:
    """Called with a title, the amount done and the total (0: unknown).

    A thread prints the lines, so that they also appear during a single slow step.
    """

    def __init__(
        self, *, transient: bool = False, shown: bool = True, interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """transient: remove the bar at the end. shown: False prints neither bar nor lines."""
        self.console = Console(stderr=True, highlight=False)
        terminal = self.console.is_terminal
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(bar_width=20),
            rich.TaskProgressColumn(),
            _Times(self),
        )
        piped = sys.stdout is None or not sys.stdout.isatty()  # rich would print its text on the console instead
        self.bar = rich.Progress(
            *columns, console=self.console, transient=transient, disable=not (shown and terminal),
            redirect_stdout=not piped,
        )  # fmt: skip
        self._task = self.bar.add_task("starting", total=None)
        self._clock, self._interval, self._said = clock, interval, clock()
        self.stage = Stage("starting", began=self._said, reported=self._said)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, daemon=True) if shown and not terminal else None

    def __enter__(self) -> Progress:
        self.bar.start()
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exception) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.bar.stop()

    def __call__(self, title: str, done: float, total: float, *, seconds: float | None = None) -> None:
        """seconds: time taken so far, from work that measures it itself. Otherwise time counts from the first report
        of a stage. A stage lasts while the total stays the same and `done` does not decrease."""
        now, last = self._clock(), self.stage
        if seconds is not None:
            began, first = now - seconds, 0.0
        elif total == last.total and done >= last.done:
            began, first = last.began, last.first
        else:
            began, first = now, done
        self.stage = Stage(title, done, total, began, first, now)
        self.bar.update(self._task, description=escape(printable(title)), completed=done, total=total or None)

    def say(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self._said = self._clock()
        self.console.print(escape(printable(text)), soft_wrap=True)

    def tick(self) -> float:
        """Print a line if the last one is an interval old; returns the seconds until the next is due."""
        now = self._clock()
        if now - self._said >= self._interval:
            self.say(self.stage.line(now))
        return self._said + self._interval - now

    def times(self) -> str:
        return self.stage.times(self._clock())

    def _print_lines(self) -> None:
        wait = self._interval
        while not self._ended.wait(wait):
            try:
                wait = self.tick()
            except (OSError, ValueError):  # standard error was closed; the work continues
                return


class _Times(rich.ProgressColumn):
    """The same times as in a line, for the bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def render(self, task: rich.Task) -> Text:
        return Text(self.progress.times())


def duration(seconds: float) -> str:
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
