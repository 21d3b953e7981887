"""Longformer's pattern, window 256 and 16 global tokens, beside PyTorch's SDPA with the same pattern as a dense boolean
mask: forward and backward, 8 heads of 64, float32, two threads. Both are held against each other first.

    python benchmarks/longformer.py [LENGTH]

SDPA has one set of projections, so here the global tokens' own queries, keys and values are the layer's: the pattern is
the same work on both sides. A second line tells the time with the two products that Longformer's own projections take.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import View
from spanformer.attention.chosen import Chosen
from spanformer.attention.longformer import Longformer
from spanformer.bench.timing import Patience, round_robin
from spanformer.cost.malloc import keep_freed_memory

HEADS, SIZE, WINDOW, GLOBALS, ROUNDS = 8, 64, 256, 16, 7


class SameProjections(Longformer):
    """Global tokens with the queries, keys and values of all others."""

    given: tuple[Tensor, Tensor, Tensor]

    def _project(self, view: View, tq: int, tk: int, queries: Chosen) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.given
        return queries.take(q), k, v


def main(length: int) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    keep_freed_memory(True)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3))
    x, g = torch.randn(1, length, HEADS * SIZE, requires_grad=True), torch.randn(1, HEADS, length, SIZE)
    positions = list(range(0, length, length // GLOBALS))[:GLOBALS]
    options = {"positions": positions, "causal": False}
    same, own = (make(HEADS * SIZE, HEADS, WINDOW, **options) for make in (SameProjections, Longformer))
    same.given, same.backend, own.backend = (q, k, v), "native", "native"
    place = torch.arange(length)
    mask = (place[:, None] - place).abs() <= WINDOW // 2
    mask[:, positions] = mask[positions] = True

    def ours() -> Tensor:
        return same.mix(q, k, v, same.rule(), View(x=x)).out

    def projected() -> Tensor:
        return own.mix(q, k, v, own.rule(), View(x=x)).out

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def step(forward) -> list[Tensor]:
        inputs = [q, k, v] if forward is not projected else [q, k, v, x, *own.parameters()]
        out = forward()
        return [out, *torch.autograd.grad(out, inputs, g)]

    off = max(float((a - b).detach().abs().max()) for a, b in zip(step(ours), step(dense), strict=True))
    assert off < 1e-4, f"the two differ by {off}"
    functions = {f.__name__: lambda f=f: step(f) for f in (ours, projected, dense)}
    timings = round_robin(functions, repeats=ROUNDS, shortest=0.3, patience=Patience(60.0))
    print(f"length {length}, {torch.get_num_threads()} threads; density {mask.float().mean():.3f}, off by {off:.1e}")
    for name, timing in timings.items():
        ratio = timing.times_as_fast_as(timings["dense"])
        print(f"{name:10} {1e3 * timing.median:8.1f} ms   {ratio:5.2f} times as fast   ({timing.disturbed} disturbed)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4096)
