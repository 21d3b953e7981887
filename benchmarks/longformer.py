"""Longformer's pattern, window 256 and 16 global tokens, forward and backward, 8 heads of 64, float32, two threads.

    python benchmarks/longformer.py           beside PyTorch's SDPA under the same pattern as a dense mask, at 4,096
    python benchmarks/longformer.py flat      time per token from 2,048 to 32,768 tokens

SDPA has one set of projections, so in `ours` the global tokens' own queries, keys and values are the layer's: the
pattern is the same work as `dense`. `projected` is Longformer with projections of its own, two products over all tokens
more; `dense projected` does that by SDPA, a second time for the global rows. Results that should be the same are held
against each other first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import View
from spanformer.attention.longformer import Longformer
from spanformer.bench.timing import Patience, round_robin
from spanformer.core.malloc import keep_freed_memory
from spanformer.model.linear import Linear

HEADS, SIZE, WINDOW, GLOBALS, ROUNDS = 8, 64, 256, 16, 7


class SameProjections(Longformer):
    """Global tokens with the queries, keys and values of all others."""

    given: tuple[Tensor, Tensor, Tensor]

    def _project(self, chosen: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.given
        return q[:, :, self.positions], k, v


def steps(length: int) -> dict[str, Callable[[], list[Tensor]]]:
    """One forward and backward of each: the output, and gradients of q, k, v and what else it learns."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3))
    x, g = torch.randn(1, length, HEADS * SIZE, requires_grad=True), torch.randn(1, HEADS, length, SIZE)
    positions = list(range(0, length, length // GLOBALS))[:GLOBALS]
    same, own = (
        make(HEADS * SIZE, HEADS, WINDOW, positions=positions, causal=False) for make in (SameProjections, Longformer)
    )
    own.start_from(*(Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in range(3)))  # as a model's layer does
    same.given, same.backend, own.backend = (q, k, v), "native", "native"

    def step(out: Tensor, *more: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, [q, k, v, *more], g)]

    def dense() -> list[Tensor]:
        return step(F.scaled_dot_product_attention(q, k, v, attn_mask=pattern(length, positions)))

    def dense_projected() -> list[Tensor]:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=pattern(length, positions))
        rows = F.scaled_dot_product_attention(*own._project(x[:, positions], x))
        return step(found.index_copy(2, torch.tensor(positions), rows), x, *own.parameters())

    return {
        "ours": lambda: step(same.mix(q, k, v, same.rule(), View(x=x)).out),
        "projected": lambda: step(own.mix(q, k, v, own.rule(), View(x=x)).out, x, *own.parameters()),
        "dense": dense,
        "dense projected": dense_projected,
    }


_patterns: dict[int, Tensor] = {}


def pattern(length: int, positions: list[int]) -> Tensor:
    """[length, length] bool, made once: making it is not timed."""
    if length not in _patterns:
        place = torch.arange(length)
        mask = (place[:, None] - place).abs() <= WINDOW // 2
        mask[:, positions] = mask[positions] = True
        _patterns[length] = mask
    return _patterns[length]


def beside_dense(length: int = 4096) -> None:
    functions = steps(length)
    off = 0.0
    for mine, theirs in (("ours", "dense"), ("projected", "dense projected")):
        pairs = zip(functions[mine](), functions[theirs](), strict=True)
        off = max(off, *(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    assert off < 1e-4, f"they differ by {off}"
    timings = round_robin(functions, repeats=ROUNDS, shortest=0.3, patience=Patience(60.0))
    print(f"length {length}, {torch.get_num_threads()} threads; same results to {off:.1e} of the largest")
    for name, timing in timings.items():
        for peer in ("dense", "dense projected"):
            ratio = timing.times_as_fast_as(timings[peer])
            print(f"{name:16} {1e3 * timing.median:8.1f} ms   {ratio:5.2f} times as fast as {peer}")


def flat() -> None:
    lengths = [2048 * 2**n for n in range(5)]
    functions = {str(length): steps(length)["ours"] for length in lengths}
    timings = round_robin(functions, repeats=ROUNDS, shortest=0.3, patience=Patience(60.0))
    per_token = {length: 1e6 * timings[str(length)].median / length for length in lengths}
    for length, time in per_token.items():
        print(f"{length:6} tokens   {time:7.2f} µs per token   ({timings[str(length)].disturbed} disturbed)")
    print(f"longest over shortest time per token: {max(per_token.values()) / min(per_token.values()):.3f}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    keep_freed_memory(True)
    if sys.argv[1:] == ["flat"]:
        flat()
    else:
        beside_dense()
