"""`spanformer bench longformer`: time Longformer's pattern against PyTorch's SDPA with the same dense mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import View
from spanformer.attention.longformer import Longformer
from spanformer.bench.per_token import relative_per_token
from spanformer.bench.session import Bench, BenchOptions, check_parts, check_same
from spanformer.model.linear import Linear

HEADS, SIZE, WINDOW, GLOBALS = 8, 64, 256, 16
LENGTHS, QUICK_LENGTHS = (2048, 4096, 8192, 16384, 32768), (256, 512)


@dataclass(frozen=True)
class LongformerBench(BenchOptions):
    """Time Longformer's window of 256 with 16 global tokens, forward and backward, 8 heads of 64, float32.

        spanformer bench longformer --parts dense
        spanformer bench longformer --parts flat

    SDPA has one set of projections, so in `ours` the global tokens use the layer's queries, keys and values: the same
    work as `dense`. `projected` is Longformer with separate projections, which adds two products over all tokens;
    `dense projected` does the same with SDPA and a second call for the global rows. Results that should be equal are
    compared first.
    """

    rounds: int = 7
    """Rounds; each times all contenders in turn, and results are medians over rounds."""
    parts: tuple[str, ...] = ()
    """dense: against SDPA with a dense mask, at 4,096 tokens (with --quick: 512); flat: time per token from 2,048 to
    32,768 tokens (with --quick: 256 and 512). Default: both."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)


def run(bench: Bench[LongformerBench]) -> None:
    chosen = bench.options.parts or tuple(PARTS)
    bench.plan(len(chosen))
    for part in chosen:
        PARTS[part](bench)


class SameProjections(Longformer):
    """Longformer whose global tokens share the queries, keys and values of all others."""

    given: tuple[Tensor, Tensor, Tensor]

    def _project(self, global_attention_mask: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.given
        return q[:, :, self.positions], k, v


def steps(length: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Forward and backward of each contender: returns the output and the gradients of q, k, v and parameters."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, requires_grad=True) for _ in range(3))
    x, g = torch.randn(1, length, HEADS * SIZE, requires_grad=True), torch.randn(1, HEADS, length, SIZE)
    positions = list(range(0, length, length // GLOBALS))[:GLOBALS]
    same, own = (
        make(HEADS * SIZE, HEADS, WINDOW, positions=positions, causal=False) for make in (SameProjections, Longformer)
    )
    own.start_from(*(Linear(HEADS * SIZE, HEADS * SIZE, bias=False) for _ in range(3)))  # as a model's layer does
    same.given = q, k, v  # pyright: ignore[reportArgumentType]
    same.backend = own.backend = "native"

    def step(out: Tensor, *more: Tensor) -> list[Tensor]:
        return [out.detach(), *torch.autograd.grad(out, [q, k, v, *more], g)]

    def dense() -> list[Tensor]:
        return step(F.scaled_dot_product_attention(q, k, v, attn_mask=pattern(length, positions)))

    def dense_projected() -> list[Tensor]:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=pattern(length, positions))
        rows = F.scaled_dot_product_attention(*own._project(x[:, positions], x))
        return step(found.index_copy(2, torch.tensor(positions), rows), x, *own.parameters())

    return {
        "ours": lambda: step(same(q, k, v, same.rule(), View(x=x)).out),
        "projected": lambda: step(own(q, k, v, own.rule(), View(x=x)).out, x, *own.parameters()),
        "dense": dense,
        "dense projected": dense_projected,
    }


_patterns: dict[int, Tensor] = {}


def pattern(length: int, positions: list[int]) -> Tensor:
    """[length, length] bool; built once, outside the timing."""
    if length not in _patterns:
        place = torch.arange(length)
        mask = (place[:, None] - place).abs() <= WINDOW // 2
        mask[:, positions] = mask[positions] = True
        _patterns[length] = mask
    return _patterns[length]


def beside_dense(bench: Bench[LongformerBench]) -> None:
    length = bench.options.size(4096, 512)
    functions = steps(length)
    off = max(
        check_same(mine, functions[mine](), functions[theirs]())
        for mine, theirs in (("ours", "dense"), ("projected", "dense projected"))
    )
    times = bench.compare(f"beside SDPA at {length} tokens", functions, shortest=0.3)
    rows = {
        name: {"ms": 1e3 * timing.median}
        | {f"times_as_fast_as_{peer}": timing.times_as_fast_as(times[peer]) for peer in ("dense", "dense projected")}
        for name, timing in times.items()
    }
    bench.keep("dense", {"length": length, "off": off, "rows": rows})
    bench.say(f"length {length}, {bench.options.threads} threads; same results to {off:.1e} of the largest")
    for name, row in rows.items():
        for peer in ("dense", "dense projected"):
            bench.say(f"{name:16} {row['ms']:8.1f} ms   {row[f'times_as_fast_as_{peer}']:5.2f} times as fast as {peer}")


def flat(bench: Bench[LongformerBench]) -> None:
    lengths = QUICK_LENGTHS if bench.options.quick else LENGTHS
    functions = {str(length): steps(length)["ours"] for length in lengths}
    times = bench.compare("time per token", functions, shortest=0.3)
    relative = relative_per_token(times, lengths)
    rows = [
        {"length": length, "us_per_token": 1e6 * times[str(length)].median / length, "relative": share,
         "disturbed": times[str(length)].disturbed}
        for length, share in zip(lengths, relative, strict=True)
    ]  # fmt: skip
    bench.keep("flat", rows)
    for row in rows:
        bench.say(
            f"{row['length']:6} tokens   {row['us_per_token']:7.2f} µs per token   ({row['disturbed']} disturbed)"
        )
    bench.say(f"longest over shortest time per token: {max(relative) / min(relative):.3f}")


PARTS = {"dense": beside_dense, "flat": flat}
OPTIONS = LongformerBench
