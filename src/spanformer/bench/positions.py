"""`spanformer bench positions`: time attention with each position encoding."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.bench.gallery import model
from spanformer.bench.session import Bench, BenchOptions
from spanformer.kinds import POSITIONS
from spanformer.model.build import make_position
from spanformer.ops import Rule, attend, choose_backend
from spanformer.position import Position

HEADS, SIZE, WINDOW = 8, 64, 256
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PositionsBench(BenchOptions):
    """Time attention, forward and backward, with each position encoding against none.

        spanformer bench positions --length 4096 --rounds 3

    Heads see all earlier tokens, or 256. Every encoding is first checked against the dense reference in float64 on a
    short text. A result is the median over rounds of the time relative to no encoding in that round.
    """

    length: int = 0
    """Tokens of the text. Default: 4096 (with --quick: 128)."""


OPTIONS = PositionsBench


def run(bench: Bench[PositionsBench]) -> None:
    length = bench.options.length or bench.options.size(4096, 128)
    names = list(encodings(length))
    bench.plan(1 + 2 * (len(names) - 1))
    bench.begin("checking every encoding")
    check(bench.options.size(300, 60), reach=bench.options.size(100, 20))
    bench.end()
    tensors, ratios = inputs(length, torch.float32), {name: {"everything": 1.0, "window": 1.0} for name in names}
    for title, reach in (("everything", length), ("window", WINDOW)):
        bare, *others = encodings(length).items()
        none = functools.partial(step, bare[1], tensors, reach)
        for name, position in others:
            functions = {"none": none, "with": functools.partial(step, position, tensors, reach)}
            times = bench.compare(f"{name}, {title}", functions, shortest=0.05)
            ratios[name][title] = times["none"].times_as_fast_as(times["with"])
    backends = {name: backend(position, tensors, length) for name, position in encodings(length).items()}
    bench.keep("positions", {
        "length": length, "heads": HEADS, "size": SIZE, "window": WINDOW,
        "over_none": {name: ratios[name] | {"backend": backends[name]} for name in names},
    })  # fmt: skip
    bench.say(f"{length} tokens, {HEADS} heads of {SIZE}, float32, {bench.options.threads} threads: over none")
    bench.say(f"{'':16}{'everything':>12}{f'{WINDOW} tokens':>12}   backend")
    for name, found in ratios.items():
        bench.say(f"{name:16}{found['everything']:12.2f}{found['window']:12.2f}   {backends[name]}")


def encodings(length: int) -> dict[str, Position]:
    """No encoding, and all encodings that act inside attention (absolute ones are added to the tokens before it)."""
    names = ["none", *(name for name, kind in POSITIONS.items() if not kind.absolute)]
    return {
        name: make_position(model("full", heads=HEADS, head_dim=SIZE, length=length, position=name)) for name in names
    }


def step(position: Position, tensors: Inputs, reach: int, backend: str = "auto") -> list[Tensor]:
    """The output, and the gradients of q, k, v and the encoding's parameters."""
    q, k, v = tensors
    rule = Rule(HEADS, reach=reach)
    added = position.rule(View(), reach)
    turned = position.encode(q, k, View())
    out = attend(*turned, v, rule if added is None else rule + added, backend=backend).out
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, *position.parameters()])]


def inputs(length: int, dtype: torch.dtype) -> Inputs:
    """q, k and v, with the same values in every dtype."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, generator=g).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v


def check(length: int, reach: int) -> None:
    """Check each encoding against the dense reference, within a small multiple of the reference's float32 error."""
    torch.manual_seed(0)
    for name, position in encodings(length).items():
        exact = step(position.double(), inputs(length, torch.float64), reach, "reference")
        dense = step(position.float(), inputs(length, torch.float32), reach, "reference")
        found = step(position, inputs(length, torch.float32), reach)
        for true, same, got in zip(exact, dense, found, strict=True):
            allowed = 12 * (same - true).abs().max() + 1e-6 * true.abs().max()
            if not (got - true).abs().max() <= allowed:
                raise ValueError(f"{name} differs from the dense reference; wrong results are not timed")


def backend(position: Position, tensors: Inputs, length: int) -> str:
    return choose_backend(*tensors, Rule(HEADS) + (position.rule(View(), length) or Rule(HEADS)))
