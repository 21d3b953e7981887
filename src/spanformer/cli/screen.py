"""The output of a training run: a progress bar, and a line for each event that should stay on the screen."""

from __future__ import annotations

import math
import os

import numpy as np

from spanformer.cli.progress import Progress
from spanformer.core.events import (
    ASKED,
    UNIT_NAMES,
    CostEvent,
    EvalEvent,
    Event,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    SkipEvent,
    StartEvent,
    StepEvent,
    StepsEvent,
    StopEvent,
)
from spanformer.report.measures import TIMED, lasting, said_parts, time_parts
from spanformer.train.config import RunConfig


class Screen:
    """Shows events and progress on standard error."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.first = os.environ.get("RANK", "0") == "0"
        self.progress = Progress(shown=self.first)
        self.unit, self.latest = "token", ""
        asked = ASKED.get(config.objective)
        self.asked = asked and f"{asked} token"

    def __enter__(self) -> Screen:
        self.progress.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.__exit__(*exception)

    def show(self, event: Event | ProgressEvent | StepsEvent) -> None:
        """Checkpoints and dynamic spans appear in the report only."""
        match event:
            case ProgressEvent():  # preparing data, evaluating, measuring, saving
                self.progress(event.title, event.done, event.total)
            case StepsEvent():
                self._steps(event)
            case StartEvent():
                self._start(event)
            case ResumeEvent():
                self.unit = UNIT_NAMES[event.unit]
                self.progress.say(f"continued from step {event.step:,} ({event.path})")
            case StepEvent():
                self._step(event)
            case EvalEvent():
                self._eval(event)
            case NoteEvent():
                self.progress.say(f"note: {event.text}")
            case SkipEvent():
                self.progress.say(f"step {event.step:,} skipped: {event.reason}")
            case CostEvent():
                self._cost(event)
            case StopEvent():
                self._stop(event)

    def _steps(self, event: StepsEvent | StepEvent) -> None:
        """Update the bar, with the numbers of the last logged step."""
        train, step, seconds = self.config.train, event.step, event.seconds
        done = min(1.0, max(step / train.steps, seconds / (train.minutes * 60) if train.minutes else 0.0))
        self.progress(f"step {step:,}{self.latest}", done, 1.0, seconds=seconds)

    def _start(self, event: StartEvent) -> None:
        self.unit = UNIT_NAMES[event.unit]
        shape, machine = event.shape, event.machine
        self.progress.say(
            f"{event.run}: {event.parameters / 1e6:.2f} M parameters, {shape.layers} layers of {shape.heads} "
            f"heads, spans up to {shape.max_span:,}; {event.config['data']['source']}, "
            f"{event.units['train']:,} {self.unit}s to train on; {machine['device']}, {machine['threads']} threads"
        )

    def _step(self, event: StepEvent) -> None:
        spans = event.spans[~np.isnan(event.spans)]
        span = f" · span {spans.mean():.0f} on average, {spans.max():.0f} longest" if len(spans) else ""
        self.latest = (
            f" · {_number(event.bits, '.3f')} bits per {self.asked or self.unit} · "
            f"{_number(event.tokens_per_second, ',.0f')} tokens/s{span}"
        )
        self._steps(event)

    def _eval(self, event: EvalEvent) -> None:
        exact = "" if math.isnan(event.exact) else f", {100 * event.exact:.2f} % exactly right"
        bits = f"{_number(event.bits, '.3f')} bits per {self.asked or self.unit}"
        self.progress.say(f"step {event.step:,}: {bits}{exact} on {event.split}")

    def _cost(self, event: CostEvent) -> None:
        parts = time_parts({name: getattr(event, f"{name}_seconds")["learned"] for name in TIMED})
        self.progress.say(f"a step takes {lasting(sum(parts.values()))}, measured separately: {said_parts(parts)}")

    def _stop(self, event: StopEvent) -> None:
        each = f", {lasting(event.seconds / event.step)} each" if event.step else ""
        self.progress.say(f"ended: {event.reason}, {event.step:,} steps in {event.seconds:.0f} s of training{each}")


def _number(value: float, form: str) -> str:
    """A number that could not be computed is NaN."""
    return "?" if math.isnan(value) else format(value, form)
