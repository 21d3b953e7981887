"""What a position encoding costs: attention forward and backward with it, over the same without.

Heads see everything before them, or 256 tokens. Every encoding is first held against the dense reference, on a short
text and in float64. All are timed in turn, round by round; a figure is the median over rounds of an
encoding's time relative to none's in that round. Prints a table.

    python benchmarks/positions.py [LENGTH] [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.bench.timing import Patience, round_robin
from spanformer.core.malloc import keep_freed_memory
from spanformer.ops import Rule, attend, choose_backend
from spanformer.position import T5, Alibi, DATransformer, DistanceBias, Position, Rotary, Shaw, Table, TransformerXL

HEADS, SIZE, WINDOW = 8, 64, 256


def encodings(length: int) -> dict[str, Position]:
    return {
        "none": Position(),
        "rotary": Rotary(SIZE),
        "alibi": Alibi(HEADS),
        "t5": T5(HEADS),
        "distance_bias": DistanceBias(HEADS, length),
        "table": Table(HEADS, SIZE, length),
        "shaw": Shaw(HEADS, SIZE, 16),
        "transformer_xl": TransformerXL(HEADS * SIZE, HEADS, SIZE),
        "da_transformer": DATransformer(HEADS),
    }


def step(position: Position, q: Tensor, k: Tensor, v: Tensor, reach: int, backend: str = "auto") -> list[Tensor]:
    rule = Rule(HEADS, reach=reach)
    added = position.rule(View(), reach)
    turned = position.turn(q, k, View())
    out = attend(*turned, v, rule if added is None else rule + added, backend=backend).out
    return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, *position.parameters()])]


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, SIZE, dtype=dtype, requires_grad=True) for _ in range(3)]


def main(length: int, rounds: int) -> None:
    keep_freed_memory(True)
    torch.manual_seed(0)
    for name, position in encodings(300).items():
        exact = step(position.double(), *inputs(300, torch.float64), 100, "reference")
        dense = step(position.float(), *inputs(300, torch.float32), 100, "reference")
        found = step(position, *inputs(300, torch.float32), 100)
        for true, same, got in zip(exact, dense, found, strict=True):
            allowed = 12 * (same - true).abs().max() + 1e-6 * true.abs().max()
            assert (got - true).abs().max() <= allowed, f"{name} is not what the reference gives"
    tensors, functions = inputs(length, torch.float32), {}
    for reach in (length, WINDOW):
        for name, position in encodings(length).items():
            functions[reach, name] = lambda p=position, r=reach: step(p, *tensors, r)
    times = round_robin(functions, repeats=rounds, shortest=0.05, budget=1e9, patience=Patience(300.0))
    print(f"{length} tokens, {HEADS} heads of {SIZE}, float32, {torch.get_num_threads()} threads: over none\n")
    print(f"{'':16}{'everything':>12}{f'{WINDOW} tokens':>12}   backend")
    for name, position in encodings(length).items():
        row = [
            statistics.median(a / b for a, b in zip(times[r, name].samples, times[r, "none"].samples, strict=True))
            for r in (length, WINDOW)
        ]
        rule = Rule(HEADS) + (position.rule(View(), length) or Rule(HEADS))
        print(f"{name:16}{row[0]:12.2f}{row[1]:12.2f}   {choose_backend(*tensors, rule)}")


if __name__ == "__main__":
    given = [int(n) for n in sys.argv[1:3]]
    main(*given, *(4096, 5)[len(given) :])
