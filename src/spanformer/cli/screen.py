"""What a run shows while it goes on: one live line, and a line for everything worth keeping."""

from __future__ import annotations

import math
import os
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spanformer.core.text import printable
from spanformer.report.measures import TIMED, lasting, said_parts, time_parts
from spanformer.report.rows import ASKED
from spanformer.train.config import RunConfig

QUIET_SECONDS = 10.0  # between lines where there is no terminal to redraw one on
UNITS = {"char": "character"}


class Screen:
    """Shows events (rows of events.jsonl) on standard error."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.first = os.environ.get("RANK", "0") == "0"
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
        )  # fmt: skip
        self.progress = Progress(*columns, console=self.console, disable=not (self.first and self.console.is_terminal))
        self.task = self.progress.add_task("starting", total=None)
        self.unit, self.said = "token", 0.0
        asked = ASKED.get(config.model.kind)
        self.asked = asked and f"{asked} token"

    def __enter__(self) -> Screen:
        self.progress.start()
        return self

    def __exit__(self, *_exception) -> None:
        self.progress.stop()

    def show(self, row: dict) -> None:
        handler = getattr(self, "_" + row["event"], None)
        if handler is not None:
            handler(row)

    def _say(self, text: str) -> None:
        self.console.print(escape(printable(text)), soft_wrap=True)

    def _prepare(self, row: dict) -> None:
        self.progress.update(
            self.task, description=escape(printable(row["title"])), completed=row["done"], total=row["total"]
        )

    def _begin(self, row: dict, done: float) -> None:
        """Training begins, at this share of it; what was shown before is no measure of its pace."""
        self.unit = UNITS.get(row["unit"], row["unit"])
        self.progress.reset(self.task, total=1.0, completed=done, description="training")  # pyright: ignore[reportArgumentType]

    def _done(self, step: int, seconds: float) -> float:
        train = self.config.train
        return min(1.0, max(step / train.steps, seconds / (train.minutes * 60) if train.minutes else 0.0))

    def _start(self, row: dict) -> None:
        self._begin(row, 0.0)
        shape, machine = row["shape"], row["machine"]
        self._say(
            f"{row['run']}: {row['parameters'] / 1e6:.2f} M parameters, {shape['layers']} layers of {shape['heads']} "
            f"heads, spans up to {shape['max_span']:,}; {row['config']['data']['source']}, "
            f"{row['units']['train']:,} {self.unit}s to train on; {machine['device']}, {machine['threads']} threads"
        )

    def _resume(self, row: dict) -> None:
        self._begin(row, self._done(row["step"], row["seconds"]))
        self._say(f"continued from step {row['step']:,} ({row['path']})")

    def _step(self, row: dict) -> None:
        spans = [z for layer in row["spans"] for z in layer if z is not None]
        span = f" · span {sum(spans) / len(spans):.0f} on average, {max(spans):.0f} longest" if spans else ""
        text = (
            f"step {row['step']:,} · {_number(row['bits'], '.3f')} bits per {self.asked or self.unit} · "
            f"{_number(row['tokens_per_second'], ',.0f')} tokens/s{span}"
        )
        done = self._done(row["step"], row["seconds"])
        self.progress.update(self.task, description=text, completed=done, total=1.0)
        if self.progress.disable and time.monotonic() - self.said > QUIET_SECONDS:
            self.said = time.monotonic()
            left = row["seconds"] * (1 - done) / done if done else 0.0
            self._say(f"{text} · {row['seconds']:.0f} s, {left:.0f} s left")

    def _eval(self, row: dict) -> None:
        exact = f", {100 * row['exact']:.2f} % exactly right" if "exact" in row else ""
        bits = f"{_number(row['bits'], '.3f')} bits per {self.asked or self.unit}"
        self._say(f"step {row['step']:,}: {bits}{exact} on {row['split']}")

    def _note(self, row: dict) -> None:
        self._say(f"note: {row['text']}")

    def _skip(self, row: dict) -> None:
        self._say(f"step {row['step']:,} skipped: {row['reason']}")

    def _cost(self, row: dict) -> None:
        parts = time_parts({name: row[f"{name}_seconds"]["learned"] for name in TIMED})
        self._say(f"a step takes {lasting(sum(parts.values()))}, measured by itself: {said_parts(parts)}")

    def _stop(self, row: dict) -> None:
        each = f", {lasting(row['seconds'] / row['step'])} each" if row["step"] else ""
        self._say(f"ended: {row['reason']}, {row['step']:,} steps in {row['seconds']:.0f} s of training{each}")


def _number(value: float | None, form: str) -> str:
    """A number that could not be computed is NaN to who trains and null in a file."""
    return "?" if value is None or math.isnan(value) else format(value, form)
