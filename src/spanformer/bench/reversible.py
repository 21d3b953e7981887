"""`spanformer bench reversible`: time and memory of deep stacks that keep no activations, and of chunks.

`python -m spanformer.bench.reversible JOB` measures peak memory in a process of its own (see `memory`).
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch

from spanformer.bench.memory import MIB, Peak, in_fresh_process
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.core.peak import peak_of
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig
from spanformer.model.lm import LM

Stack = Literal["residual", "reversible"]
STACKS: tuple[Stack, ...] = get_args(Stack)
VOCAB, DEPTHS = 256, (6, 12, 24)


@dataclass(frozen=True)
class ReversibleBench(BenchOptions):
    """Time a training step of reversible stacks and of chunked feed-forwards, and measure their peak memory.

        spanformer bench reversible
        spanformer bench reversible --parts memory

    Windows of 64, width 256 with 4 heads, feed-forward of 1,024 inner numbers, 8 × 512 tokens, float32. A step is
    forward and backward. Peak memory is beyond weights, gradients and tokens.
    """

    parts: tuple[str, ...] = ()
    """memory: peak of 6, 12 and 24 layers; step: a reversible stack against a residual one, 12 layers; chunks: the
    feed-forward in chunks of 1,024 tokens against all at once, 3 layers, 32 × 512 tokens, in both stacks. Default:
    all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)


@dataclass(frozen=True)
class Model:
    layers: int
    stack: Stack
    chunk: int = 0
    batch: int = 8
    tokens: int = 512

    def step(self) -> Callable[[], object]:
        """Forward and backward; gradients exist from the first call on."""
        torch.manual_seed(0)
        lm = LM(
            ModelConfig(
                vocab=VOCAB, dim=256, layers=self.layers, heads=4, stack=self.stack,
                attention=AttentionConfig(kind="window(64)"), feedforward=FeedForwardConfig(chunk=self.chunk),
            )
        )  # fmt: skip
        x = torch.randint(0, VOCAB, (self.batch, self.tokens + 1))

        def run(tokens: int = self.tokens) -> None:
            lm(x[:, :tokens], targets=x[:, 1 : tokens + 1]).nll.mean().backward()

        run(8)
        return run


def run(bench: Bench[ReversibleBench]) -> None:
    chosen = bench.options.parts or tuple(PARTS)
    bench.plan(len(chosen))
    for part in chosen:
        PARTS[part](bench)


def _made(bench: Bench[ReversibleBench], layers: int, stack: Stack, chunk: int = 0, batch: int = 8) -> Model:
    if bench.options.quick:
        return Model(max(1, layers // 6), stack, chunk // 64, 2, 32)
    return Model(layers, stack, chunk, batch)


def memory(bench: Bench[ReversibleBench]) -> None:
    bench.begin("peak memory")
    rows = []
    for stack in STACKS:
        for chunk, layers in itertools.product((0, 1024), DEPTHS):
            model = _made(bench, layers, stack, chunk)
            job = {"model": asdict(model), "threads": bench.options.threads}
            peak = in_fresh_process("spanformer.bench.reversible", job, bench.options.threads)
            rows.append(
                {"stack": stack, "layers": model.layers, "chunk": model.chunk, "mib": peak.mib, "reason": peak.reason}
            )
            told = peak.reason if peak.mib is None else f"{peak.mib:8.1f} MiB"
            bench.say(f"{stack:10}   {model.layers:2} layers   {_chunks(chunk):20} {told}")
    bench.end()
    bench.keep("memory", rows)


def step(bench: Bench[ReversibleBench]) -> None:
    _beside(bench, "step", {stack: _made(bench, 12, stack) for stack in STACKS})


def chunks(bench: Bench[ReversibleBench]) -> None:
    for stack in STACKS:
        models = {_chunks(chunk): _made(bench, 3, stack, chunk, batch=32) for chunk in (0, 1024)}
        _beside(bench, f"chunks of a {stack} stack", models)


def _chunks(chunk: int) -> str:
    return f"chunks of {chunk:,}" if chunk else "all at once"


def _beside(bench: Bench[ReversibleBench], title: str, models: dict[str, Model]) -> None:
    """Time each model; ratios are over the first."""
    times = bench.compare(title, {name: model.step() for name, model in models.items()})
    first = next(iter(times.values()))
    rows = {name: {"ms": 1e3 * t.median, "times_the_first": 1 / t.times_as_fast_as(first)} for name, t in times.items()}
    bench.keep(title, rows)
    for name, row in rows.items():
        bench.say(f"{title}: {name:14} {row['ms']:8.1f} ms   {row['times_the_first']:.2f} times the first")


def _measure(model: Model, threads: int) -> Peak:
    torch.set_num_threads(threads)
    peak, seconds = peak_of(model.step())
    return Peak(peak / MIB, seconds)


PARTS = {"memory": memory, "step": step, "chunks": chunks}
OPTIONS = ReversibleBench

if __name__ == "__main__":
    _job = json.loads(sys.argv[1])
    print(json.dumps(asdict(_measure(Model(**_job["model"]), _job["threads"]))))
