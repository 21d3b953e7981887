"""`spanformer bench linear`: time attention with a recurrent state against full causal SDPA and other packages.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spanformer.bench import linear_decode, linear_peers, linear_table
from spanformer.bench.gallery import DIM, HEADS
from spanformer.bench.linear_work import (
    SDPA,
    check_mechanism,
    make_kind,
    make_text,
    of_mechanism,
    peak_memory,
    prove_chunks,
)
from spanformer.bench.memory import MIB
from spanformer.bench.per_token import relative_per_token
from spanformer.bench.plan import LONGEST_YARDSTICK
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.kinds import KINDS
from spanformer.kinds.notation import parse_kind

LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (64, 128)
FLAT, QUICK_FLAT = (2048, 4096, 8192, 16384, 32768, 65536), (64, 128)


@dataclass(frozen=True)
class LinearBench(BenchOptions):
    """Time attention with a recurrent state, forward and backward, float32, 8 heads of 64.

        spanformer bench linear --parts speed --kinds linear "performer(128)"
        spanformer bench linear --parts peers --fla FOLDER
        spanformer bench linear --out docs/results/linear.json
        spanformer bench linear --out docs/results/linear.json --parts table

    Each mechanism and each peer is checked against a float64 oracle of what it computes, on the same shape, before it
    is timed. A ratio is the median of the rounds' own ratios.
    """

    parts: tuple[str, ...] = ()
    """speed: against full causal SDPA, by length; flat: time per token from 2,048 to 65,536 tokens; memory: peak at
    65,536 tokens; peers: against other packages at 4,096 tokens (performer-pytorch: 1,024); decode: one token after
    1,024, 32,768 and 1,000,000; table: print the result file as Markdown. Default: all but table."""
    kinds: tuple[str, ...] = ()
    """Mechanisms, as run files write them. Default: every kind with a recurrent state."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths of part speed; SDPA beyond 16,384 is extrapolated by their squares. Default: 1024 2048 4096
    8192 16384 (with --quick: 64 128)."""
    fla: Path | None = None
    """A clone of flash-linear-attention; its PyTorch forms are loaded by file. Default: the installed package."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        for text in self.chosen_kinds:
            parse_kind(text, "kinds")
        if self.lengths and min(self.lengths) < 2:
            raise ValueError(f"lengths holds {min(self.lengths)}; expected at least 2 tokens")
        if self.lengths and min(self.lengths) > LONGEST_YARDSTICK:
            raise ValueError(
                f"lengths holds {min(self.lengths)} and no shorter one; expected one up to {LONGEST_YARDSTICK}, where "
                "SDPA is timed"
            )
        if self.fla is not None and not (self.fla / "fla" / "ops").is_dir():
            raise ValueError(f"fla is {self.fla}; expected a clone of flash-linear-attention, with fla/ops in it")

    @property
    def chosen_kinds(self) -> tuple[str, ...]:
        return self.kinds or tuple(kind.timed for kind in KINDS.values() if kind.cost.recurrent is not None)


def run(bench: Bench[LinearBench]) -> None:
    for part in bench.options.parts or [part for part in PARTS if part != "table"]:
        PARTS[part](bench)


def speed(bench: Bench[LinearBench]) -> None:
    options, rows, yardstick = bench.options, [], (0, 0.0)
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    bench.plan(len(lengths))
    for length in lengths:
        inputs, timed = make_text(length), {}
        contenders = {"SDPA": SDPA} if length <= LONGEST_YARDSTICK else {}
        for kind in options.chosen_kinds:
            bench.begin(f"checking {kind} at {length:,} tokens")
            prove_chunks(kind)
            mechanism = make_kind(kind, length)
            checked = check_mechanism(mechanism, inputs)
            row = {"kind": kind, "length": length, "off": checked.off}
            rows.append(row)
            if checked.wrong:
                row["wrong"] = checked.wrong
                bench.say(f"{kind:16} {length:6} tokens: WRONG, {checked.wrong}")
                continue
            contenders[kind], timed[kind] = of_mechanism(mechanism), row
        steps: dict[str, Callable[[], object]] = {
            name: functools.partial(contender.step, inputs) for name, contender in contenders.items()
        }
        times = bench.compare(f"{length:,} tokens", steps)
        if "SDPA" in times:
            yardstick = (length, times["SDPA"].median)
        for kind, row in timed.items():
            full = yardstick[1] * (length / yardstick[0]) ** 2
            ratio = times[kind].times_as_fast_as(times["SDPA"]) if "SDPA" in times else full / times[kind].median
            row |= {
                "ms": 1e3 * times[kind].median, "sdpa_ms": 1e3 * full, "sdpa_extrapolated": "SDPA" not in times,
                "times_as_fast": ratio, "disturbed": times[kind].disturbed,
            }  # fmt: skip
            guess = "" if "SDPA" in times else " (extrapolated)"
            bench.say(
                f"{kind:16} {length:6} tokens {row['ms']:9.2f} ms   SDPA{guess} {row['sdpa_ms']:9.2f} ms   "
                f"{ratio:6.1f}x"
            )
        bench.keep("speed", rows)


def flat(bench: Bench[LinearBench]) -> None:
    lengths, rows = QUICK_FLAT if bench.options.quick else FLAT, []
    texts = {length: make_text(length) for length in lengths}
    bench.plan(len(bench.options.chosen_kinds))
    for kind in bench.options.chosen_kinds:
        bench.begin(f"checking {kind} at {lengths[-1]:,} tokens")
        prove_chunks(kind)
        mechanism = make_kind(kind, lengths[-1])
        checked = check_mechanism(mechanism, texts[lengths[-1]], gradients=False)
        row: dict = {"kind": kind, "lengths": lengths, "off": checked.off}
        rows.append(row)
        if checked.wrong:
            row["wrong"] = checked.wrong
            bench.say(f"{kind:16} WRONG, {checked.wrong}")
            bench.end()
            continue
        step = of_mechanism(mechanism).step
        times = bench.compare(f"time per token: {kind}", {str(n): functools.partial(step, texts[n]) for n in lengths})
        relative = relative_per_token(times, lengths)
        row["us_per_token"] = [1e6 * times[str(n)].median / n for n in lengths]
        row["spread"] = max(relative) / min(relative) - 1
        shown = " ".join(f"{each:.2f}" for each in row["us_per_token"])
        bench.say(f"{kind:16} µs per token {shown}   spread {100 * row['spread']:.1f} %")
        bench.keep("flat", rows)


def memory(bench: Bench[LinearBench]) -> None:
    length, rows = bench.options.size(65536, 1024), []
    unit = HEADS * DIM * length * torch.float32.itemsize / MIB
    bench.plan(len(bench.options.chosen_kinds))
    for kind in bench.options.chosen_kinds:
        bench.begin(f"peak memory of {kind} at {length:,} tokens")
        peak = peak_memory(kind, length, bench.options.threads)
        if peak.mib is None:
            bench.say(f"{kind:16} not measured: {peak.reason}")
            rows.append({"kind": kind, "length": length, "reason": peak.reason})
        else:
            rows.append({"kind": kind, "length": length, "peak_mib": peak.mib, "units_of_q": peak.mib / unit})
            bench.say(f"{kind:16} {peak.mib:8.1f} MiB beyond the inputs, {peak.mib / unit:.2f} times q")
        bench.end()
    bench.keep("memory", rows)


def peers(bench: Bench[LinearBench]) -> None:
    linear_peers.measure(bench, bench.options.fla)


def decode(bench: Bench[LinearBench]) -> None:
    linear_decode.measure(bench, bench.options.chosen_kinds)


def table(bench: Bench[LinearBench]) -> None:
    shown = linear_table.tables(bench.file)
    if not shown:
        raise ValueError(f"{bench.file.path} holds no measurements; measure first, without --parts table")
    bench.say(shown)


PARTS: dict[str, Callable[[Bench[LinearBench]], None]] = {
    "speed": speed, "flat": flat, "memory": memory, "peers": peers, "decode": decode, "table": table,
}  # fmt: skip
OPTIONS = LinearBench
