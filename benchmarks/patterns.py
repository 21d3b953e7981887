"""Fixed patterns on the native kernel, forward and backward, float32, 8 heads of 64:

    speed   times as fast as PyTorch's SDPA with the same pattern as a dense boolean mask, at 4,096 tokens
    flat    time per token from 2,048 to 32,768 tokens, of patterns that cost O(n · w)
    local   times as fast as the package local-attention (pip install local-attention), the same window

    python benchmarks/patterns.py [speed] [flat] [local] [--rounds N] [--out results/patterns.json]

Everything of one part is timed in turn, round by round; a ratio is the median of the rounds' own ratios. Before it is
timed, each pattern's output and gradients are held against the peer's. What a pattern is made into (its block index) is
made once, before: a layer keeps it. Parts that are not asked for keep what the file has of them.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import json
import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from spanformer import Rule, attend
from spanformer.attention.big_bird import BigBird
from spanformer.attention.pattern import Pattern, parse
from spanformer.bench.timing import Patience, Timing, round_robin
from spanformer.core.malloc import keep_freed_memory
from spanformer.ops.kernel import library

HEADS, DIM, LENGTH = 8, 64, 4096
LENGTHS = [2048, 4096, 8192, 16384, 32768]
BIG_BIRD = str(BigBird(1, 64).patterns[0])  # 3 blocks of window, 2 global, 3 random
SPEED = {  # name: (pattern, causal, what was aimed at)
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
FLAT = ("window 256", "window 128 + 1 + 128, both ways", "window 256 and 16 global",
        "window 128 + 1 + 128 and 16 global, both ways", "BigBird, block 64: 3 window, 2 global, 3 random",
        "BigBird, causal", "dilated, 64 of every 4th", "image, block 128 and 128 before", "blockwise, blocks of 256",
        "image, blocks of 8 x 8, 64 a line")  # fmt: skip


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


def ours(rule: Rule) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(q, k, v, rule, backend="native").out


def agree(name: str, mine: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest value; more than float32 explains is an error."""
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True))
    if not worst < 1e-4:
        raise SystemExit(f"{name} differs from its peer by {worst:.2g}: no speed")
    return worst


def speed(rounds: int) -> list[dict]:
    work, rows = Work(LENGTH), []
    at = torch.arange(LENGTH)
    for name, (text, causal, aim) in SPEED.items():
        pattern = parse(text)
        mask = pattern.visible(at[:, None], at, causal=causal, length=LENGTH)

        def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        run = ours(pattern.rule(HEADS, LENGTH, causal=causal))
        off = agree(name, work.step(run), work.step(dense))
        calls: dict[str, Callable[[], object]] = {
            "ours": functools.partial(work.step, run),
            "dense": functools.partial(work.step, dense),
        }
        timings = round_robin(calls, repeats=rounds, warm_up=1, shortest=0.2, patience=Patience(2.0))
        ratio = timings["ours"].times_as_fast_as(timings["dense"])
        rows.append({
            "name": name, "pattern": text, "causal": causal, "density": round(float(mask.float().mean()), 5),
            "ms": _ms(timings["ours"]), "sdpa_dense_mask_ms": _ms(timings["dense"]), "times_as_fast": round(ratio, 2),
            "aim": aim, "off": off,
        })  # fmt: skip
        aimed = "" if aim is None else f"  (aim {aim:g}x)"
        print(f"{name:48} {_ms(timings['ours']):8.1f} ms   SDPA, dense mask {_ms(timings['dense']):8.1f} ms   "
              f"{ratio:5.1f}x{aimed}", flush=True)  # fmt: skip
    return rows


def flat(rounds: int) -> list[dict]:
    works, rows = {length: Work(length) for length in LENGTHS}, []
    for name in FLAT:
        text, causal, _ = SPEED[name]
        calls: dict[str, Callable[[], object]] = {}
        pairs: dict[int, int] = {}
        for length, work in works.items():
            rule = parse(text).rule(HEADS, length, causal=causal)
            calls[str(length)] = functools.partial(work.step, ours(rule))
            pairs[length] = _pairs(parse(text), length, causal)
        timings = round_robin(calls, repeats=rounds, shortest=0.2, patience=Patience(2.0))
        done = min(len(t.samples) for t in timings.values())
        per_token = [[timings[str(n)].samples[r] / n for n in LENGTHS] for r in range(done)]
        relative = [[time / statistics.mean(row) for time in row] for row in per_token]
        medians = [statistics.median(row[i] for row in relative) for i in range(len(LENGTHS))]
        spread = max(medians) / min(medians) - 1
        microseconds = [round(1e6 * timings[str(n)].median / n, 2) for n in LENGTHS]
        rows.append({
            "name": name, "pattern": text, "causal": causal, "lengths": LENGTHS, "us_per_token": microseconds,
            "pairs_per_token": [round(pairs[n] / n, 1) for n in LENGTHS], "spread": round(spread, 4),
        })  # fmt: skip
        print(f"{name:48} µs per token {microseconds}   spread {100 * spread:.1f} %", flush=True)
    return rows


def local(rounds: int) -> list[dict]:
    LocalAttention = importlib.import_module("local_attention").LocalAttention
    work, rows = Work(LENGTH), []
    for window in (128, 256, 512):
        # its window does not count the token itself
        peer = LocalAttention(window, causal=True, exact_windowsize=True, use_rotary_pos_emb=False)
        run = ours(Rule(HEADS, reach=window + 1))
        off = agree(f"window {window}", work.step(run), work.step(peer))
        calls: dict[str, Callable[[], object]] = {
            "ours": functools.partial(work.step, run),
            "peer": functools.partial(work.step, peer),
        }
        timings = round_robin(calls, repeats=rounds, shortest=0.2, patience=Patience(2.0))
        ratio = timings["ours"].times_as_fast_as(timings["peer"])
        rows.append({
            "window": window, "ms": _ms(timings["ours"]), "local_attention_ms": _ms(timings["peer"]),
            "times_as_fast": round(ratio, 2), "aim": 2.0, "off": off,
        })  # fmt: skip
        print(f"window {window:4}: {_ms(timings['ours']):8.1f} ms   local-attention {_ms(timings['peer']):8.1f} ms   "
              f"{ratio:5.1f}x  (aim 2x)", flush=True)  # fmt: skip
    return rows


def _ms(timing: Timing) -> float:
    return round(1e3 * timing.median, 2)


def _pairs(pattern: Pattern, length: int, causal: bool) -> int:
    """How many pairs are seen, from the block index."""
    index = pattern.blocks(length, causal=causal)
    counts = torch.cat([index.masks.flatten(1).sum(1), torch.tensor([index.size**2])])  # full blocks are id −1
    return int(counts[index.mask_ids].sum())


PARTS = {"speed": speed, "flat": flat, "local": local}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all, unless given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/patterns.json"))
    args = parser.parse_args()
    chosen = args.parts or list(PARTS)
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    torch.set_num_threads(args.threads)
    keep_freed_memory(True)
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    for part in chosen:
        results[part] = {
            "date": datetime.date.today().isoformat(), "commit": commit, "machine": platform.machine(),
            "instructions": library().isa, "threads": args.threads, "torch": torch.__version__, "heads": HEADS,
            "dim": DIM, "rounds": args.rounds, "rows": PARTS[part](args.rounds),
        }  # fmt: skip
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
