"""What a run shows while it goes on: how far it is, and a line for everything worth keeping."""

from __future__ import annotations

import math
import os

from spanformer.cli.progress import Progress
from spanformer.report.measures import TIMED, lasting, said_parts, time_parts
from spanformer.report.rows import ASKED
from spanformer.train.config import RunConfig

UNITS = {"char": "character"}


class Screen:
    """Shows events (rows of events.jsonl) and progress on standard error."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.first = os.environ.get("RANK", "0") == "0"
        self.progress = Progress(shown=self.first)
        self.unit, self.latest = "token", ""
        asked = ASKED.get(config.model.kind)
        self.asked = asked and f"{asked} token"

    def __enter__(self) -> Screen:
        self.progress.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.__exit__(*exception)

    def show(self, row: dict) -> None:
        handler = getattr(self, "_" + row["event"], None)
        if handler is not None:
            handler(row)

    def _progress(self, row: dict) -> None:
        """Of anything but steps: preparing data, evaluating, measuring, saving."""
        self.progress(row["title"], row["done"], row["total"])

    def _steps(self, row: dict) -> None:
        """`done` steps are done, in `seconds` of training; `latest` is what the last row of them said."""
        train, step, seconds = self.config.train, row["step"], row["seconds"]
        done = min(1.0, max(step / train.steps, seconds / (train.minutes * 60) if train.minutes else 0.0))
        self.progress(f"step {step:,}{self.latest}", done, 1.0, seconds=seconds)

    def _start(self, row: dict) -> None:
        self.unit = UNITS.get(row["unit"], row["unit"])
        shape, machine = row["shape"], row["machine"]
        self.progress.say(
            f"{row['run']}: {row['parameters'] / 1e6:.2f} M parameters, {shape['layers']} layers of {shape['heads']} "
            f"heads, spans up to {shape['max_span']:,}; {row['config']['data']['source']}, "
            f"{row['units']['train']:,} {self.unit}s to train on; {machine['device']}, {machine['threads']} threads"
        )

    def _resume(self, row: dict) -> None:
        self.unit = UNITS.get(row["unit"], row["unit"])
        self.progress.say(f"continued from step {row['step']:,} ({row['path']})")

    def _step(self, row: dict) -> None:
        spans = [z for layer in row["spans"] for z in layer if z is not None]
        span = f" · span {sum(spans) / len(spans):.0f} on average, {max(spans):.0f} longest" if spans else ""
        self.latest = (
            f" · {_number(row['bits'], '.3f')} bits per {self.asked or self.unit} · "
            f"{_number(row['tokens_per_second'], ',.0f')} tokens/s{span}"
        )
        self._steps(row)

    def _eval(self, row: dict) -> None:
        exact = f", {100 * row['exact']:.2f} % exactly right" if "exact" in row else ""
        bits = f"{_number(row['bits'], '.3f')} bits per {self.asked or self.unit}"
        self.progress.say(f"step {row['step']:,}: {bits}{exact} on {row['split']}")

    def _note(self, row: dict) -> None:
        self.progress.say(f"note: {row['text']}")

    def _skip(self, row: dict) -> None:
        self.progress.say(f"step {row['step']:,} skipped: {row['reason']}")

    def _cost(self, row: dict) -> None:
        parts = time_parts({name: row[f"{name}_seconds"]["learned"] for name in TIMED})
        self.progress.say(f"a step takes {lasting(sum(parts.values()))}, measured by itself: {said_parts(parts)}")

    def _stop(self, row: dict) -> None:
        each = f", {lasting(row['seconds'] / row['step'])} each" if row["step"] else ""
        self.progress.say(f"ended: {row['reason']}, {row['step']:,} steps in {row['seconds']:.0f} s of training{each}")


def _number(value: float | None, form: str) -> str:
    """A number that could not be computed is NaN to who trains and null in a file."""
    return "?" if value is None or math.isnan(value) else format(value, form)
