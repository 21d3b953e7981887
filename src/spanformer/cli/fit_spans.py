"""`spanformer fit-spans MODEL --data TEXT --budget 0.25`: learn one span per KV head of a pretrained model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.events import FILE, EvalEvent, Event, NoteEvent, ProgressEvent, StartEvent, StepEvent, StopEvent
from spanformer.core.processor import named_dtype
from spanformer.core.progress import OnProgress
from spanformer.core.text import printable
from spanformer.core.version import VERSION
from spanformer.hf.fit_events import LoraStep, Measured, Trial, WindowStep
from spanformer.hf.fits import what_fits
from spanformer.hf.plan import FitPlan, FitRun
from spanformer.train.event_log import EventLog
from spanformer.train.run_events import describe_machine
from spanformer.train.run_folder import hold_folder


@dataclass(frozen=True, kw_only=True)
class FitOptions(FitPlan):
    model: tyro.conf.Positional[str]
    """a folder in Hugging Face's format, a .gguf file or a folder with one, or a name on the Hugging Face Hub"""
    data: str
    """text to learn from: a file, a folder or a glob"""
    valid: str = ""
    """validation text; empty: the last twentieth of the data"""
    out: str = "out/fit"
    """folder for the model with its spans, spans.json, events.jsonl and the report"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 if the CPU has instructions for bfloat16 products, else float32"""


def run(options: FitOptions) -> None:
    with hold_folder(Path(options.out)):
        fit(options, Path(options.out))


def fit(options: FitOptions, out: Path) -> None:
    """Learn the spans, save the model with them in `out`, and print the results."""
    from spanformer.cli.summary import show_summary

    for name, what in ((FILE, "a run"), ("config.json", "a model")):
        if (out / name).exists():
            raise ValueError(f"{out} already holds {what}; choose another folder with --out")
    begun = time.monotonic()
    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        run = FitRun(options.model, options.data, options.valid, options, named_dtype(options.dtype))
        for line in what_fits(run.model, options, run.share):
            report.say(line)
        with EventLog(out / FILE, tensorboard=None) as log:
            log.write(start_event(run, options, out))
            rows = FitLog(run, log.write, report, begun)
            outcome = run.fit(rows.take)
            log.write(StopEvent(rows.step, "fitted", time.monotonic() - begun))
        report(f"writing {out}", 0, 0)
        run.save(out, outcome)
    print(outcome.text())
    show_summary(out)
    shown = printable(out)
    print(f"model: {shown}; to measure its long-range recall: spanformer probe {shown}")


def start_event(run: FitRun, options: FitOptions, out: Path) -> StartEvent:
    """The first event, as in a training run: the unit is bytes, and the parameters are the spans."""
    texts = {"train": run.train, "valid": run.held_out}
    return StartEvent(
        step=0, run=out.name, config={"fit": asdict(options)}, parameters=run.spans, unit="byte",
        tokens={name: each.ids.numel() for name, each in texts.items()},
        units={name: int(each.bytes.sum()) for name, each in texts.items()},
        shape=run.shape(), machine=describe_machine("cpu", 1), version=VERSION,
    )  # fmt: skip


class FitLog:
    """Writes the progress of fitting as events for the report, and updates the progress bar."""

    def __init__(self, run: FitRun, write: Callable[[Event], None], report: OnProgress, begun: float) -> None:
        self.run, self.write, self.report, self.begun, self.step = run, write, report, begun, 0

    def take(self, event: WindowStep | Trial | LoraStep | Measured | NoteEvent | ProgressEvent) -> None:
        match event:
            case ProgressEvent():
                self.report(event.title, event.done, event.total)
            case WindowStep():
                self.step, steps = event.step, self.run.plan.steps
                title = f"step {event.step} of {steps}: {event.kl:.4f} nats from the full model"
                self.report(title, event.step, steps)
                self.write(self._step(event))
            case LoraStep():
                steps = self.run.plan.lora_steps
                self.report(f"LoRA {event.step} of {steps}: {event.kl:.4f} nats", event.step, steps)
            case Measured():
                seconds = time.monotonic() - self.begun
                self.write(EvalEvent(self.step, seconds, "valid", event.loss, event.bits, event.tokens))
            case NoteEvent():
                self.write(NoteEvent(self.step, event.text))
            case Trial():
                distance = f"{event.kl:.4f} nats from the full model on held-out texts"
                self.write(NoteEvent(event.step, f"hard windows at step {event.step}: {distance}"))

    def _step(self, event: WindowStep) -> StepEvent:
        group, context = self.run.group, self.run.plan.length
        spans = [[min(w, context) for w in layer for _ in range(group)] for layer in event.windows]
        reach = [
            [min(context, own.window or context, int(w + event.ramp / 2) + 1 + own.sink_tokens) for w in layer]
            for layer, own in zip(spans, self.run.layers, strict=True)
        ]
        flat, tokens = [w for layer in spans for w in layer], event.step * context
        return StepEvent(
            step=event.step, seconds=time.monotonic() - self.begun, tokens=tokens, loss=event.kl,
            penalty=event.price * sum(map(sum, event.windows)), price=event.price, lr=event.lr,
            grad_norm=event.grad_norm, tokens_per_second=tokens / max(event.seconds, 1e-9), spans=np.array(spans),
            reach=np.array(reach), memory=[max(layer) for layer in reach], span_average=sum(flat) / len(flat),
            span_longest=max(flat),
        )  # fmt: skip


FIT = Command(FitOptions, run)
