"""`spanformer bench quality`: train the adaptive-span paper's code and spanformer on the same data and recipe."""

from __future__ import annotations

import functools
import math
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanformer.bench.paper import CLIP, PaperCode, check_clone, our_model
from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.events import ProgressEvent, StepsEvent
from spanformer.core.processor import best_dtype
from spanformer.data import DataConfig, Lanes, Prepared, prepare
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig
from spanformer.model.load import load
from spanformer.report.events import read_run
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.evaluate import evaluate_as_original
from spanformer.train.optim import OptimConfig
from spanformer.train.run import train

SIZES = {"dim": 256, "layers": 4, "heads": 4, "span": 1024}
QUICK_SIZES = {"dim": 32, "layers": 2, "heads": 2, "span": 64}
BATCH, LANES = 8, 8


@dataclass(frozen=True)
class QualityBench(BenchOptions):
    """Train the adaptive-span paper's code and spanformer on the same data with the same recipe, and measure when the
    modern recipe reaches the same quality.

        spanformer bench quality --original CLONE --data enwik8.gz
        spanformer bench quality --only modern

    Data: the first 10 MB of enwik8's training split. Model: 4 layers, d 256, 4 heads, span 1024, block 256, batch 8.
    Optimiser: Adagrad 0.07 with clipping 0.03, warm-up 200. Validation: the first 256 KiB of the validation split, by
    the protocol of the paper's code (8 lanes, whole blocks). Seconds are those of training steps only. The modern
    recipe has the same number of parameters within 1 %; its time ends at the first evaluation that is as good as the
    original's last. Every run is trained once; --rounds and --budget have no effect.
    """

    original: Path | None = None
    """A clone of facebookresearch/adaptive-span; without one, original is skipped."""
    data: str = ""
    """Copy of enwik8 on disk; by default it is downloaded."""
    source: str = "enwik8"
    """Training text: a named corpus, a file, a folder or a glob."""
    steps: int = 800
    """Training steps (with --quick: 3)."""
    only: tuple[str, ...] = ()
    """Runs to train: original, ours, modern. Default: all, original only with a clone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clone(self.original)
        if unknown := [name for name in self.only if name not in RUNS]:
            raise ValueError(f"only holds {unknown[0]!r}; expected any of {', '.join(RUNS)}")
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1")
        if "original" in self.only and self.original is None:
            raise ValueError("only holds 'original', which needs a clone of its code: --original PATH")

    @property
    def sizes(self) -> dict[str, int]:
        return QUICK_SIZES if self.quick else SIZES

    @property
    def taken(self) -> int:
        """steps"""
        return min(self.steps, 3) if self.quick else self.steps

    @property
    def block(self) -> int:
        return self.size(256, 16)

    @property
    def valid(self) -> int:
        """Tokens of the validation text."""
        return self.size(1 << 18, 1 << 10)


def run(bench: Bench[QualityBench]) -> None:
    o = bench.options
    config = DataConfig(source=o.source, copy=o.data, limit=0 if o.quick else 10_000_000)
    data = prepare(config, on_progress=bench.report)
    for name in o.only or (n for n in RUNS if n != "original" or o.original):
        found = RUNS[name](bench, data, config)
        bench.keep(name, found)
        bench.say(f"{name}: " + ", ".join(f"{key} {_shown(value)}" for key, value in found.items()))


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_original(bench: Bench[QualityBench], data: Prepared, _config: DataConfig) -> dict:
    """Train the paper's model with its optimiser and training step, on spanformer's lanes, which equal its batches."""
    o = bench.options
    torch.manual_seed(1)
    assert o.original is not None
    code = PaperCode(o.original, vocab=data.vocab.size, lr=0.07, **o.sizes)
    schedule = torch.optim.lr_scheduler.LambdaLR(code.optimizer, lambda n: min(1, n / 200))
    lanes = Lanes(data.splits["train"].ids, BATCH, o.block, seed=1)
    memory, seconds = code.start(BATCH), 0.0
    for step in range(o.taken):
        bench.report("training the paper's code", step, o.taken)
        batch = next(lanes)
        began = time.perf_counter()
        memory = code.step(torch.from_numpy(batch.x), torch.from_numpy(batch.y), memory, schedule.step)
        seconds += time.perf_counter() - began
    parameters = sum(p.numel() for p in code.model.parameters())
    average = float(np.mean([float(s._mask.current_val.mean()) for s in code.spans])) * o.sizes["span"]
    return {"bits": _original_bits(bench, code, data), "seconds": seconds, "steps": o.taken, "parameters": parameters,
            "average_span": average}  # fmt: skip


@torch.no_grad()
def _original_bits(bench: Bench[QualityBench], code: PaperCode, data: Prepared) -> float:
    o = bench.options
    code.model.eval()
    ids = data.splits["valid"].ids[: o.valid].astype(np.int64)
    rows = ids[: len(ids) // LANES * LANES].reshape(LANES, -1)
    memory, losses = code.start(LANES), []
    for at in range(0, rows.shape[1] - o.block, o.block):
        bench.report("evaluating the paper's code", at, rows.shape[1])
        piece = torch.from_numpy(rows[:, at : at + o.block + 1])
        loss, memory = code.loss(piece[:, :-1], piece[:, 1:], memory)
        losses.append(float(loss))
    return float(np.mean(losses)) / math.log(2)


def run_ours(bench: Bench[QualityBench], data: Prepared, config: DataConfig) -> dict:
    o = bench.options
    model = our_model(vocab=data.vocab.size, **o.sizes)
    optim = OptimConfig(kind="adagrad", lr=0.07, clip=CLIP, schedule="constant", warmup=200)
    found = trained(bench, data, RunConfig(data=config, model=model, optim=optim, train=training(o, o.taken)), "ours")
    if original := bench.file.found("original"):
        found["bits_over_original"] = found["bits"] - original["bits"]
        found["times_as_fast"] = original["seconds"] / found["seconds"]
    return found


def run_modern(bench: Bench[QualityBench], data: Prepared, config: DataConfig) -> dict:
    """Pre-norm, RMSNorm, SwiGLU, rotary, Muon and AdamW, bfloat16 if the CPU has instructions for it. A larger
    feed-forward replaces the parameters of the position table."""
    o, target = bench.options, bench.file.found("original") or {}
    span = o.sizes["span"]
    model = ModelConfig(
        vocab=data.vocab.size, dim=o.sizes["dim"], layers=o.sizes["layers"], heads=o.sizes["heads"],
        attention=AttentionConfig(max_span=span), feedforward=FeedForwardConfig(kind="swiglu", dim=o.size(704, 88)),
    )  # fmt: skip
    dtype: Any = str(best_dtype()).removeprefix("torch.")
    optim = OptimConfig(kind="muon", lr=4e-3, span_lr=2e-2, warmup=30, weight_decay=0.1)
    settings = replace(
        training(o, min(o.taken, 350)), minutes=target.get("seconds", 350) / 3 / 60, eval_every=50, dtype=dtype
    )
    found = trained(bench, data, RunConfig(data=config, model=model, optim=optim, train=settings), "modern")
    rows = [e for e in read_run(folder(bench, "modern")).evals if e.split == "valid"]
    there = [e for e in rows if e.bits <= target.get("bits", 0)]
    found["seconds_to_original"] = there[0].seconds if there else None
    found["share_of_original_time"] = there[0].seconds / target["seconds"] if there else None
    return found


def training(o: QualityBench, steps: int) -> TrainConfig:
    return TrainConfig(
        batch=BATCH, block=o.block, steps=steps, eval_every=0, eval_tokens=o.valid, save_every=0, measure=False,
        threads=o.threads,
    )  # fmt: skip


def folder(bench: Bench[QualityBench], name: str) -> Path:
    """The folder of a run, below a folder named after the result file."""
    return bench.file.path.with_suffix("") / name


def trained(bench: Bench[QualityBench], data: Prepared, config: RunConfig, name: str) -> dict:
    out, steps = folder(bench, name), config.train.steps
    shutil.rmtree(out, ignore_errors=True)

    def watch(event: object) -> None:
        if isinstance(event, ProgressEvent):
            bench.report(event.title, event.done, event.total)
        elif isinstance(event, StepsEvent):
            bench.report(f"training {name}", event.step, steps)

    train(replace(config, out=str(out)), watch=watch)
    rows = read_run(out)
    ids = data.splits["valid"].ids[: bench.options.valid]
    score = evaluate_as_original(
        load(out), ids, block=config.train.block, lanes=LANES,
        on_progress=functools.partial(bench.report, f"evaluating {name}"),
    )  # fmt: skip
    last = rows.steps[-1]
    return {"bits": score.loss / math.log(2), "seconds": last.seconds, "steps": last.step,
            "parameters": rows.start.parameters, "average_span": float(np.nanmean(last.spans))}  # fmt: skip


RUNS = {"original": run_original, "ours": run_ours, "modern": run_modern}
OPTIONS = QualityBench
