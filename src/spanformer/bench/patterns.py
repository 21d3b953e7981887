"""`spanformer bench patterns`: time fixed patterns on the native kernel against SDPA and local-attention."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from spanformer.attention.big_bird import BigBird
from spanformer.attention.pattern import Pattern, parse
from spanformer.bench.per_token import relative_per_token
from spanformer.bench.session import Bench, BenchOptions, check_parts, check_same
from spanformer.bench.timing import Timing
from spanformer.ops import AnyRule, Rule, attend

HEADS, DIM = 8, 64
LENGTHS, QUICK_LENGTHS = (2048, 4096, 8192, 16384, 32768), (256, 512)
BIG_BIRD = str(BigBird(1, 64, tokens=2, random=3).patterns[0])  # 3 blocks of window, 2 global, 3 random
SPEED = {  # name: (pattern, causal, target ratio)
    "window 256": ("Window(256)", True, 8.0),
    "window 128 + 1 + 128, both ways": ("Window(129)", False, 8.0),
    "strided, l = 64": ("Strided(64)", True, 5.0),
    "window 256 and 16 global": ("Window(256) | Global(16)", True, 7.0),
    "window 128 + 1 + 128 and 16 global, both ways": ("Window(129) | Global(16)", False, 7.0),
    "BigBird, block 64: 3 window, 2 global, 3 random": (BIG_BIRD, False, 8.0),
    "BigBird, causal": (BIG_BIRD, True, 8.0),
    "fixed, l = 128, c = 8": ("Fixed(128, 8)", True, None),
    "dilated, 64 of every 4th": ("Dilated(64, 4)", True, None),
    "image, block 128 and 128 before": ("Block(128, 128)", True, None),
    "blockwise, 4 blocks": ("Blockwise([1, 2, 3, 0])", False, None),
    "blockwise, blocks of 256": ("Blockwise([1, 2, 3, 0], size=256)", False, None),
    "image, blocks of 8 x 8, 64 a line": ("Grid(64, 8, 8, 8, 8)", True, None),
}
WINDOWS = (128, 256, 512)
FLAT = ("window 256", "window 128 + 1 + 128, both ways", "window 256 and 16 global",
        "window 128 + 1 + 128 and 16 global, both ways", "BigBird, block 64: 3 window, 2 global, 3 random",
        "BigBird, causal", "dilated, 64 of every 4th", "image, block 128 and 128 before", "blockwise, blocks of 256",
        "image, blocks of 8 x 8, 64 a line")  # fmt: skip


@dataclass(frozen=True)
class PatternsBench(BenchOptions):
    """Time fixed patterns on the native kernel, forward and backward, float32, 8 heads of 64.

        spanformer bench patterns --parts speed
        spanformer bench patterns --out docs/results/patterns.json

    A ratio is the median of the ratios of all rounds. Each pattern's output and gradients are checked against the
    peer's before it is timed. The block index of a pattern is built once, before timing, as in a layer.
    """

    parts: tuple[str, ...] = ()
    """speed: against SDPA with a dense boolean mask, at 4,096 tokens (with --quick: 256); flat: time per token from
    2,048 to 32,768 tokens (with --quick: 256 and 512), of patterns that cost O(n · w); local: against the package
    local-attention with the same window. Default: all, local if that package is installed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)


def run(bench: Bench[PatternsBench]) -> None:
    chosen = bench.options.parts or tuple(part for part in PARTS if part != "local" or _has_local_attention())
    bench.plan(sum(STEPS[part] for part in chosen))
    for part in chosen:
        bench.keep(part, PARTS[part](bench))


class Work:
    """Inputs of one length, and one call forward and backward."""

    def __init__(self, length: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.q, self.k, self.v = (torch.randn(1, HEADS, length, DIM, generator=g).requires_grad_() for _ in range(3))
        self.toward = torch.randn(1, HEADS, length, DIM, generator=g)

    def step(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """The output and its gradients."""
        out = forward(self.q, self.k, self.v)
        return [out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.toward)]


def ours(rule: AnyRule) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(q, k, v, rule, backend="native").out


def speed(bench: Bench[PatternsBench]) -> list[dict]:
    length, rows = bench.options.size(4096, 256), []
    work, at = Work(length), torch.arange(length)
    for name, (text, causal, aim) in SPEED.items():
        pattern = parse(text)
        mask = pattern.visible(at[:, None], at, causal=causal, length=length)
        if not mask.any(-1).all():  # SDPA returns NaN for queries that see no key
            bench.say(f"{name:48} skipped: at {length} tokens some queries see no key")
            bench.end()
            continue

        def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        mine = functools.partial(work.step, ours(pattern.rule(HEADS, length, causal=causal)))
        theirs = functools.partial(work.step, dense)
        off = check_same(name, mine(), theirs())
        times = bench.compare(name, {"ours": mine, "dense": theirs})
        ratio = times["ours"].times_as_fast_as(times["dense"])
        rows.append({
            "name": name, "pattern": text, "causal": causal, "density": round(float(mask.float().mean()), 5),
            "ms": _ms(times["ours"]), "sdpa_dense_mask_ms": _ms(times["dense"]), "times_as_fast": round(ratio, 2),
            "aim": aim, "off": off,
        })  # fmt: skip
        aimed = "" if aim is None else f"  (aim {aim:g}x)"
        bench.say(
            f"{name:48} {_ms(times['ours']):8.1f} ms   SDPA, dense mask {_ms(times['dense']):8.1f} ms   "
            f"{ratio:5.1f}x{aimed}"
        )
    return rows


def flat(bench: Bench[PatternsBench]) -> list[dict]:
    lengths, rows = QUICK_LENGTHS if bench.options.quick else LENGTHS, []
    works = {length: Work(length) for length in lengths}
    for name in FLAT:
        text, causal, _ = SPEED[name]
        functions: dict[str, Callable[[], object]] = {}
        for length, work in works.items():
            rule = parse(text).rule(HEADS, length, causal=causal)
            functions[str(length)] = functools.partial(work.step, ours(rule))
        times = bench.compare(f"time per token: {name}", functions)
        relative = relative_per_token(times, lengths)
        spread = max(relative) / min(relative) - 1
        microseconds = [round(1e6 * times[str(n)].median / n, 2) for n in lengths]
        rows.append({
            "name": name, "pattern": text, "causal": causal, "lengths": lengths, "us_per_token": microseconds,
            "pairs_per_token": [round(_pairs(parse(text), n, causal) / n, 1) for n in lengths],
            "spread": round(spread, 4),
        })  # fmt: skip
        bench.say(f"{name:48} µs per token {microseconds}   spread {100 * spread:.1f} %")
    return rows


def local(bench: Bench[PatternsBench]) -> list[dict]:
    if not _has_local_attention():
        raise ImportError("part local needs the package local-attention: pip install local-attention")
    LocalAttention = importlib.import_module("local_attention").LocalAttention
    work, rows = Work(bench.options.size(4096, 1024)), []
    for window in WINDOWS:
        # its window does not count the token itself
        peer = LocalAttention(window, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
        mine = functools.partial(work.step, ours(Rule(HEADS, reach=window + 1)))
        theirs = functools.partial(work.step, peer)
        off = check_same(f"window {window}", mine(), theirs())
        times = bench.compare(f"window {window} beside local-attention", {"ours": mine, "peer": theirs})
        ratio = times["ours"].times_as_fast_as(times["peer"])
        rows.append({
            "window": window, "ms": _ms(times["ours"]), "local_attention_ms": _ms(times["peer"]),
            "times_as_fast": round(ratio, 2), "aim": 2.0, "off": off,
        })  # fmt: skip
        bench.say(
            f"window {window:4}: {_ms(times['ours']):8.1f} ms   local-attention {_ms(times['peer']):8.1f} ms   "
            f"{ratio:5.1f}x  (aim 2x)"
        )
    return rows


def _has_local_attention() -> bool:
    return importlib.util.find_spec("local_attention") is not None


def _ms(timing: Timing) -> float:
    return round(1e3 * timing.median, 2)


def _pairs(pattern: Pattern, length: int, causal: bool) -> int:
    """Number of visible pairs, from the block index."""
    index = pattern.blocks(length, causal=causal)
    counts = torch.cat([index.masks.flatten(1).sum(1), torch.tensor([index.size**2])])  # full blocks are id −1
    return int(counts[index.mask_ids].sum())


PARTS = {"speed": speed, "flat": flat, "local": local}
STEPS = {"speed": len(SPEED), "flat": len(FLAT), "local": len(WINDOWS)}
OPTIONS = PatternsBench
