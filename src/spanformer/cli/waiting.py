"""A progress bar for work that tells how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spanformer.core.text import printable

Tell = Callable[[str, float, float], None]


@contextlib.contextmanager
def waiting(transient: bool = False) -> Iterator[Tell]:
    """Yields tell(title, done, total), which moves the bar; a total of 0 is one that nobody knows. transient: the bar
    goes away at the end."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    nowhere = transient and not console.is_terminal
    with Progress(*columns, console=console, transient=transient, disable=nowhere) as progress:
        task = progress.add_task("starting", total=None)

        def tell(title: str, done: float, total: float) -> None:
            progress.update(task, description=escape(printable(title)), completed=done, total=total or None)

        yield tell
