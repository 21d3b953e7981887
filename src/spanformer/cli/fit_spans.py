"""`spanformer fit-spans MODEL --data TEXT --budget 0.25`: learn how far each head of a pretrained model must look."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from spanformer.cli.leaf import Leaf
from spanformer.cli.progress import Progress
from spanformer.core.processor import named_dtype
from spanformer.core.progress import OnProgress
from spanformer.core.text import printable
from spanformer.hf.plan import FitPlan
from spanformer.train.place import hold_folder


@dataclass(frozen=True, kw_only=True)
class FitOptions(FitPlan):
    model: tyro.conf.Positional[str]
    """a folder in Hugging Face's format, a .gguf file or a folder with one, or a name on the hub"""
    data: str
    """text to learn from: a file, a folder or a glob"""
    valid: str = ""
    """other text to measure on; empty: the last twentieth of the data"""
    out: str = "out/fit"
    """a folder for the model with its spans, spans.json, events.jsonl and the report"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 where the processor has units for its products, else float32"""


def run(options: FitOptions) -> None:
    with hold_folder(Path(options.out)):
        fit(options, Path(options.out))


def fit(options: FitOptions, out: Path) -> None:
    """Learn the spans, save the model with them in `out`, and show what came of it."""
    from spanformer.cli.outcome import show_outcome
    from spanformer.hf.plan import FitRun
    from spanformer.train.events import EventLog

    for name, what in (("events.jsonl", "a run"), ("config.json", "a model")):
        if (out / name).exists():
            raise ValueError(f"{out} already holds {what}; choose another folder with --out")
    begun = time.monotonic()
    with Progress() as report:
        report(f"loading {options.model}", 0, 0)
        run = FitRun(options.model, options.data, options.valid, options, named_dtype(options.dtype))
        with EventLog(out / "events.jsonl", tensorboard=None) as log:
            log.write("start", start_row(run, options, out))
            rows = Rows(run, log.write, report, begun)
            outcome = run.fit(rows.take)
            log.write("stop", {"step": rows.step, "reason": "fitted", "seconds": time.monotonic() - begun})
        report(f"writing {out}", 0, 0)
        run.save(out, outcome)
    print(outcome.text())
    show_outcome(out)
    shown = printable(out)
    print(f"model: {shown}; what its spans cost in long-range ability: spanformer probe {shown}")


def start_row(run, options: FitOptions, out: Path) -> dict:
    """What a report reads first, as of a training run: bytes are the unit, and the learned numbers are the spans."""
    import torch

    import spanformer

    texts = {"train": run.train, "valid": run.held_out}
    return {
        "format": 1, "version": spanformer.__version__, "run": out.name, "config": {"fit": asdict(options)},
        "parameters": run.spans, "unit": "byte",
        "tokens": {name: each.ids.numel() for name, each in texts.items()},
        "units": {name: int(each.bytes.sum()) for name, each in texts.items()},
        "shape": run.shape(),
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "device": "cpu",
                    "torch": torch.__version__, "processes": 1},
    }  # fmt: skip


class Rows:
    """Turns what fitting tells into rows that a report reads, and moves the bar."""

    def __init__(self, run, write, report: OnProgress, begun: float) -> None:
        self.run, self.write, self.report, self.begun, self.step = run, write, report, begun, 0

    def take(self, kind: str, row: dict) -> None:
        seconds = time.monotonic() - self.begun
        if kind == "progress":
            self.report(row["title"], row["done"], row["total"])
        elif kind == "step":
            self.step = row["step"]
            steps = self.run.plan.steps
            self.report(f"step {row['step']} of {steps}: {row['kl']:.4f} nats from the full model", row["step"], steps)
            self.write("step", self._step(row, seconds))
        elif kind == "lora":
            steps = self.run.plan.lora_steps
            self.report(f"LoRA {row['step']} of {steps}: {row['kl']:.4f} nats", row["step"], steps)
        elif kind == "bits":
            self.write("eval", {"step": self.step, "split": "valid", "bits": row["bits"], "loss": row["loss"],
                                "seconds": seconds, "tokens": row["tokens"]})  # fmt: skip
        elif kind == "note":
            self.write("note", {"step": self.step, "text": row["text"]})
        elif kind == "eval":
            text = f"whole windows at step {row['step']}: {row['kl']:.4f} nats from the full model on texts kept aside"
            self.write("note", {"step": row["step"], "text": text})

    def _step(self, row: dict, seconds: float) -> dict:
        group, context = self.run.group, self.run.plan.context
        spans = [[w for w in layer for _ in range(group)] for layer in row["windows"]]
        reach = [
            [min(context, own.window or context, int(w + row["ramp"] / 2) + 1 + own.sinks) for w in layer]
            for layer, own in zip(spans, self.run.layers, strict=True)
        ]
        flat = [w for layer in spans for w in layer]
        tokens = row["step"] * context
        return {
            "step": row["step"], "seconds": seconds, "tokens": tokens, "loss": row["kl"], "bits": None,
            "penalty": row["price"] * sum(map(sum, row["windows"])), "price": row["price"], "lr": row["lr"],
            "grad_norm": row["grad_norm"], "tokens_per_second": tokens / max(row["seconds"], 1e-9), "spans": spans,
            "reach": reach, "memory": [max(layer) for layer in reach], "span_average": sum(flat) / len(flat),
            "span_longest": max(flat),
        }  # fmt: skip


FIT = Leaf(FitOptions, run)
