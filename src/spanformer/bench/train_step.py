"""`spanformer bench train-step`: time a training step against the adaptive-span paper's code.

`python -m spanformer.bench.train_step JOB` is the process of one contender; JOB is a `Job` as JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spanformer.bench.paper import CLIP, PaperCode, check_clone, our_model
from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.malloc import keep_freed_memory
from spanformer.core.peak import resident_bytes, unsupported
from spanformer.inspect.clocks import AttentionClock
from spanformer.model.lm import LM
from spanformer.train.measure import in_steady_state, one_step
from spanformer.train.optim import ClippedAdagrad

Step = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Profile:
    layers: int
    dim: int
    heads: int
    span: int
    block: int
    batch: int
    spans: str
    steps: int


PROFILES = {
    "small-ramp": Profile(4, 256, 4, 1024, 256, 8, "ramp", 12),
    "small-long": Profile(4, 256, 4, 1024, 256, 8, "long", 8),
    "large-long": Profile(12, 512, 8, 8192, 512, 1, "long", 2),
    "large-paper": Profile(12, 512, 8, 8192, 512, 1, "paper", 2),
}
QUICK = Profile(2, 32, 4, 64, 32, 2, "long", 2)
"""small sizes that replace those of any profile"""
VOCAB = 205


def ratios(p: Profile) -> list[list[float]]:
    """[layers][heads] spans as shares of the maximum."""
    rows = [[0.0] * p.heads for _ in range(p.layers)]
    if p.spans == "long":
        for row in rows:
            row[0] = 1.0
    if p.spans == "paper":
        for n, row in enumerate(rows):
            row[:] = [share / p.span for share in (8, 16, 24, 32, 48, 64, 96, 128)][: p.heads]
            row[-1] = 0.72 if n >= p.layers - p.layers // 3 else row[-1]  # 300 on average
    return rows


@dataclass(frozen=True)
class TrainStepBench(BenchOptions):
    """Measure time and memory of a training step. With --original, also measure the adaptive-span paper's code
    (facebookresearch/adaptive-span) with the same shapes, tokens and spans.

        spanformer bench train-step --original CLONE
        spanformer bench train-step --profiles small-ramp small-long

    small: 4 layers, d 256, 4 heads, span 1024, block 256, batch 8. All spans are 0, so heads see only the ramp
    (small-ramp), or one head per layer has the maximum (small-long). large: 12 layers, d 512, 8 heads, span 8192,
    block 512, batch 1. One head per layer has the maximum (large-long), or spans are similar to the paper's: one head
    in each layer of the upper third has 0.72 of the maximum, the others at most 128 tokens (large-paper).

    Each contender runs in its own process; processes run in turn, and the ratio is the median over rounds. A step is
    forward, backward, clipping and Adagrad, with a learning rate of 0, so that the spans do not change.
    """

    rounds: int = 3
    """Rounds; each times both contenders in turn, and results are medians over rounds. Large profiles run once."""
    profiles: tuple[str, ...] = tuple(PROFILES)
    """Profiles to measure: small-ramp, small-long, large-long, large-paper."""
    original: Path | None = None
    """A clone of facebookresearch/adaptive-span; without one, only spanformer's step is measured."""
    checkpointing: bool = False
    """Recompute activations in the backward pass of spanformer's step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.profiles if name not in PROFILES]:
            raise ValueError(f"profiles holds {unknown[0]!r}; expected any of {', '.join(PROFILES)}")
        check_clone(self.original)


OPTIONS = TrainStepBench


@dataclass(frozen=True)
class Job:
    """One contender on one profile, in a separate process."""

    profile: dict
    threads: int
    checkpointing: bool
    original: str = ""
    """path of a clone; empty: measure spanformer's step"""


def run(bench: Bench[TrainStepBench]) -> None:
    if reason := unsupported():
        raise ValueError(f"train-step measures memory: {reason}")
    o = bench.options
    contenders = ["original", "ours"] if o.original else ["ours"]
    rounds = {name: bench.rounds if PROFILES[name].layers < 12 else 1 for name in o.profiles}
    bench.plan(len(contenders) * sum(rounds.values()))
    for name in o.profiles:
        profile = replace(QUICK, spans=PROFILES[name].spans) if o.quick else PROFILES[name]
        found: dict[str, list[dict]] = {contender: [] for contender in contenders}
        for number in range(rounds[name]):
            for contender in contenders:
                bench.begin(f"{name}: {contender}, round {number + 1} of {rounds[name]}")
                clone = str(o.original) if contender == "original" else ""
                found[contender].append(_measured(Job(asdict(profile), o.threads, o.checkpointing, clone)))
                bench.end()
        row = {"profile": asdict(profile)} | _summary(found)
        bench.keep(name, row)
        bench.say(_line(name, row))


def _measured(job: Job) -> dict:
    command = [sys.executable, "-m", "spanformer.bench.train_step", json.dumps(asdict(job))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the measuring process failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _summary(found: dict[str, list[dict]]) -> dict:
    row = {
        "seconds": {c: statistics.median(r["seconds"] for r in rows) for c, rows in found.items()},
        "peak_bytes": {c: max(r["peak_bytes"] for r in rows) for c, rows in found.items()},
        "attention_share": found["ours"][-1]["attention_share"],
    }
    if "original" in found:
        pairs = zip(found["original"], found["ours"], strict=True)
        row["speedup"] = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    return row


def _line(name: str, row: dict) -> str:
    seconds, peak = row["seconds"], row["peak_bytes"]
    end = f"attention is {row['attention_share']:.0%} of our step"
    if "original" not in seconds:
        return f"{name:<12} ours {seconds['ours']:.3f} s a step; peak memory {peak['ours'] / 2**20:,.0f} MiB; {end}"
    return (
        f"{name:<12} original {seconds['original']:.3f} s, ours {seconds['ours']:.3f} s a step: {row['speedup']:.2f} "
        f"times as fast; peak memory {peak['original'] / 2**20:,.0f} and {peak['ours'] / 2**20:,.0f} MiB, "
        f"{peak['original'] / peak['ours']:.1f} times less; {end}"
    )


def measure(job: Job) -> dict:
    """Median seconds per step, and the peak resident memory above that before the model was built."""
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    p = Profile(**job.profile)
    before = resident_bytes()
    step, share = original_steps(p, Path(job.original)) if job.original else our_steps(p, job.checkpointing)
    x, y = torch.randint(0, VOCAB, (2, p.batch, p.block))
    times: list[float] = []
    if not job.original:  # as in `spanformer train`; the paper's code runs unchanged
        keep_freed_memory(not job.checkpointing)
    for _ in range(p.steps + 1):
        began = time.perf_counter()
        step(x, y)
        times.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": statistics.median(times[1:]), "peak_bytes": peak, "attention_share": share(x, y)}


def original_steps(p: Profile, clone: Path) -> tuple[Step, Callable[[Tensor, Tensor], float]]:
    code = PaperCode(clone, vocab=VOCAB, dim=p.dim, layers=p.layers, heads=p.heads, span=p.span, lr=0.0)
    with torch.no_grad():
        for span, row in zip(code.spans, ratios(p), strict=True):
            span._mask.current_val.copy_(torch.tensor(row)[:, None, None])
    memory = code.start(p.batch)

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal memory
        memory = code.step(x, y, memory)

    return step, lambda _x, _y: 0.0


def our_steps(p: Profile, checkpointing: bool = False) -> tuple[Step, Callable[[Tensor, Tensor], float]]:
    lm = LM(our_model(vocab=VOCAB, dim=p.dim, layers=p.layers, heads=p.heads, span=p.span))
    with torch.no_grad():
        for module, row in zip(lm.spans_modules(), ratios(p), strict=True):
            module.ratio.copy_(torch.tensor(row))
    lm.checkpointing = checkpointing
    optimizer = ClippedAdagrad(lm.parameters(), lr=0.0, clip=CLIP)
    state = lm.start(p.batch)

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal state
        optimizer.zero_grad()
        found = lm(x, state, targets=y)
        state = found.state
        (found.nll.mean() + found.penalty).backward()
        optimizer.step()
        lm.after_step()

    def share(x: Tensor, y: Tensor) -> float:
        shares = []
        for _ in range(3):
            arguments = in_steady_state(lm, {"x": x, "targets": y})
            began = time.perf_counter()
            with AttentionClock(lm) as clock:
                one_step(lm, arguments)
            shares.append(clock.seconds / (time.perf_counter() - began))
        return statistics.median(shares)

    return step, share


if __name__ == "__main__":
    print(json.dumps(measure(Job(**json.loads(sys.argv[1])))))
