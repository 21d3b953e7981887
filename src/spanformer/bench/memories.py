"""`spanformer bench memories`: what memories lose, and what they cost per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from spanformer.attention.compressive import Compressive
from spanformer.attention.compressor import Compressor
from spanformer.bench.memory_stream import ASKED, peer_right, stream
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.data import DataConfig, Lanes, prepare
from spanformer.data.lanes import Batch
from spanformer.memory import State
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM, LMOutput
from spanformer.train.optim import OptimConfig, clip_model, lr_at, model_optimizer, set_lr

BLOCK, RATIO, BATCH = 64, 4, 8


@dataclass(frozen=True)
class MemoriesBench(BenchOptions):
    """Measure what a layer's memory loses, and whether its time and size stay constant.

        spanformer bench memories --parts compression
        spanformer bench memories --parts stream --tokens 1000000

    compression: train a small language model (bytes of the standard library, 2 layers, d 128) whose blocks are
    compressed by convolutions with the attention loss, and compare what attention reads from compressed slots of
    held-out text with what it reads from the tokens: by the trained convolution, and by mean and max pooling of the
    same states.
    stream: feed tokens through a memory of 65,536 in one layer of 2 heads of 64, k 32, in blocks of 512, and compare
    processor time and process memory of the stream's last tenth with those of its first (after the memory is full);
    every stored row is checked against the token that its position names. Nothing is repeated, so --rounds and --budget
    change nothing.
    peer: the same keys and values through the memory of memorizing-transformers-pytorch, of 4,096 and of 4,000 tokens:
    of 50 keys of the newest block, how many find their own value.
    """

    parts: tuple[str, ...] = ("compression", "stream")
    """What to measure. peer needs the package memorizing-transformers-pytorch."""
    tokens: int = 1_000_000
    """stream: its length (with --quick: 4096)."""
    steps: int = 400
    """compression: training steps (with --quick: 3)."""
    source: str = "stdlib"
    """compression: the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected at least 1")


OPTIONS = MemoriesBench


def run(bench: Bench[MemoriesBench]) -> None:
    for part in bench.options.parts:
        PARTS[part](bench)


def measure_compression(bench: Bench[MemoriesBench]) -> None:
    data, steps = prepare(DataConfig(source=bench.options.source)), bench.options.size(bench.options.steps, 3)
    bench.plan(steps)
    torch.manual_seed(0)
    attention = AttentionConfig(kind=f"compressive({BLOCK}, {BLOCK}, {BLOCK}, {RATIO})")
    dim, layers, heads = (16, 1, 2) if bench.options.quick else (128, 2, 4)
    position = PositionConfig(kind="rotary")
    lm = LM(
        ModelConfig(
            vocab=data.vocab.size, dim=dim, layers=layers, heads=heads, attention=attention, position=position
        )
    ).train()  # fmt: skip
    config = OptimConfig(warmup=min(50, steps))
    optimizer, lanes, state = model_optimizer(lm, config), Lanes(data.splits["train"].ids, BATCH, BLOCK), None
    for step in range(steps):
        bench.begin(f"step {step} of {steps}")
        batch = next(lanes)
        found = _segment(lm, batch, state)
        assert found.nll is not None
        optimizer.zero_grad(set_to_none=True)
        (found.nll.mean() + found.penalty).backward()
        clip_model(lm, config.clip)
        set_lr(optimizer, lr_at(config, step, steps))
        optimizer.step()
        state = found.state
        bench.end()
    errors = reconstruction(lm, data.splits["valid"].ids, bench.options.size(64, 4))
    bench.keep("compression", errors)
    for name, error in errors.items():
        bench.say(f"{name:6} {error:.4f} of the squared output of attention ({error / errors['mean']:.2f} of mean)")


def _segment(lm: LM, batch: Batch, state: State | None) -> LMOutput:
    return lm(torch.from_numpy(batch.x), None if batch.reset else state, targets=torch.from_numpy(batch.y))


@torch.no_grad()
def reconstruction(lm: LM, ids, segments: int) -> dict[str, float]:
    """Mean over layers: squared error of what attention reads from compressed slots, relative to what it reads."""
    layers = [m for m in lm.mechanisms() if isinstance(m, Compressive)]
    sums: dict[str, list[float]] = {}
    for layer in layers:
        layer.compression_loss = _watch(layer, sums)  # pyright: ignore[reportAttributeAccessIssue]
    lanes, state = Lanes(ids, BATCH, BLOCK), None
    for _ in range(segments):
        batch = next(lanes)
        state = _segment(lm, batch, state).state
    for layer in layers:
        del layer.compression_loss
    every = sum(sums.pop("output"))
    return {name: sum(each) / every for name, each in sums.items()}


def _watch(layer: Compressive, sums: dict[str, list[float]]) -> Callable[..., Tensor]:
    ways = {name: Compressor(layer.dim, layer.ratio, name, "attention") for name in ("mean", "max")}

    def loss(q: Tensor, old: Tensor, present: Tensor, new: Tensor, project) -> Tensor:
        tried = {"conv": new, "output": torch.zeros_like(new)} | {name: way(old) for name, way in ways.items()}
        for name, each in tried.items():
            # of zeros, keys are 0 and values are 0: the error is the whole output
            error = Compressive.compression_loss(layer, q, old, present, each, project)
            sums.setdefault(name, []).append(float(error))
        return new.new_zeros(())

    return loss


def measure_stream(bench: Bench[MemoriesBench]) -> None:
    quick = bench.options.quick
    bench.plan(1)
    bench.begin("stream")
    sizes = (4096, 512, 64, 8) if quick else (bench.options.tokens, 65_536, 512, 32)
    found = stream(*sizes)
    bench.end()
    bench.keep("stream", asdict(found))
    bench.say(
        f"{found.tokens:,} tokens: last tenth / first tenth {found.slower:.3f} of time, {found.larger:.3f} of memory"
    )
    bench.say(f"{found.wrong} wrong rows in {found.checks} checks of the whole store")


def measure_peer(bench: Bench[MemoriesBench]) -> None:
    bench.plan(2)
    found = {}
    for capacity in (4096, 4000):
        bench.begin(f"peer, {capacity} tokens")
        rows = found[str(capacity)] = peer_right(capacity, 512, 8)
        bench.end()
        shown = ", ".join(f"{right} after {tokens:,}" for tokens, right in rows)
        bench.say(f"memory of {capacity:,} tokens: of {ASKED} values right: {shown}")
    bench.keep("peer", found)


PARTS: dict[str, Callable[[Bench[MemoriesBench]], None]] = {
    "compression": measure_compression, "stream": measure_stream, "peer": measure_peer,
}  # fmt: skip
