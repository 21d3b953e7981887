"""`spanformer bench content`: time attention by content and by low rank against SDPA and other packages.

Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spanformer.bench import content_decode, content_peers, content_table, peer_tasks
from spanformer.bench.content_work import MEASURED, SHORT, Measured, check_content, peak_memory, prove_blocks
from spanformer.bench.gallery import DIM, HEADS
from spanformer.bench.linear_work import make_kind, make_text, of_mechanism
from spanformer.bench.memory import MIB
from spanformer.bench.session import Bench, BenchOptions, check_parts

LENGTHS, QUICK_LENGTHS = (1024, 2048, 4096, 8192, 16384), (128, 256)


@dataclass(frozen=True)
class ContentBench(BenchOptions):
    """Time LSH, routing and Linformer, forward and backward, float32, 8 heads of 64.

        spanformer bench content --parts speed --lengths 1024 4096
        spanformer bench content --out docs/results/content.json
        spanformer bench content --out docs/results/content.json --parts table

    Each mechanism and each peer is checked against a float64 oracle of what it computes, on the same shape, before it
    is timed. A ratio is the median of the rounds' own ratios.
    """

    parts: tuple[str, ...] = ()
    """speed: against SDPA of the same direction, by length; memory: peak at 65,536 tokens; decode: one token against a
    window of as many keys; peers: against other packages at 4,096 tokens; table: print the result file as Markdown.
    Default: all but table."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths of part speed. Default: 1024 2048 4096 8192 16384 (with --quick: 128 256)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if self.lengths and not 128 <= min(self.lengths) <= max(self.lengths) <= LENGTHS[-1]:
            wrong = next(n for n in self.lengths if not 128 <= n <= LENGTHS[-1])
            raise ValueError(f"lengths holds {wrong}; expected 128 … {LENGTHS[-1]} tokens, where SDPA is timed")


def run(bench: Bench[ContentBench]) -> None:
    for part in bench.options.parts or [part for part in PARTS if part != "table"]:
        PARTS[part](bench)


def speed(bench: Bench[ContentBench]) -> None:
    options, rows = bench.options, []
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    bench.plan(len(lengths))
    for length in lengths:
        inputs = make_text(length)
        steps: dict[str, Callable[[], object]] = {}
        timed: list[tuple[Measured, dict]] = []
        for each in MEASURED:
            kind = each.kind(length)
            bench.begin(f"checking {kind} at {length:,} tokens")
            prove_blocks(each.kind(SHORT))
            checked = check_content(kind, inputs)
            row = {"name": each.name, "kind": kind, "length": length, "off": checked.off, "causal": each.causal}
            if length in LENGTHS:
                row["aim"] = each.aims[LENGTHS.index(length)]
            rows.append(row)
            if checked.wrong:
                row["wrong"] = checked.wrong
                bench.say(f"{each.name:36} {length:6} tokens: WRONG, {checked.wrong}")
                continue
            steps[each.name] = functools.partial(of_mechanism(make_kind(kind, length)).step, inputs)
            steps[_yardstick(each)] = functools.partial(each.yardstick.step, inputs)
            timed.append((each, row))
        times = bench.compare(f"{length:,} tokens", steps)
        for each, row in timed:
            mine, full = times[each.name], times[_yardstick(each)]
            row |= {
                "ms": 1e3 * mine.median, "sdpa_ms": 1e3 * full.median, "times_as_fast": mine.times_as_fast_as(full),
                "disturbed": mine.disturbed,
            }  # fmt: skip
            bench.say(
                f"{each.name:36} {length:6} tokens {row['ms']:9.2f} ms   SDPA {row['sdpa_ms']:9.2f} ms   "
                f"{row['times_as_fast']:6.1f}x{_aimed(row.get('aim'))}"
            )
        bench.keep("speed", rows)


def _yardstick(each: Measured) -> str:
    return "SDPA" if each.causal else "SDPA, both directions"


def _aimed(aim: float | None) -> str:
    return "" if aim is None else f" (aim {aim:g}x)"


def memory(bench: Bench[ContentBench]) -> None:
    length, rows = bench.options.size(65536, 1024), []
    unit = HEADS * DIM * length * torch.float32.itemsize / MIB
    bench.plan(len(MEASURED))
    for each in MEASURED:
        kind = each.kind(length)
        bench.begin(f"peak memory of {kind} at {length:,} tokens")
        peak = peak_memory(kind, length, bench.options.threads)
        row = {"name": each.name, "kind": kind, "length": length, "aim": each.most}
        rows.append(row)
        if peak.mib is None:
            row["reason"] = peak.reason
            bench.say(f"{each.name:36} not measured: {peak.reason}")
        else:
            row |= {"peak_mib": peak.mib, "units_of_q": peak.mib / unit}
            bench.say(
                f"{each.name:36} {peak.mib:8.1f} MiB beyond the inputs, {peak.mib / unit:.2f} times q"
                + ("" if each.most is None else f" (aim {each.most:g})")
            )
        bench.end()
    bench.keep("memory", rows)


def peers(bench: Bench[ContentBench]) -> None:
    peer_tasks.measure(bench, content_peers.tasks(bench.options.size(4096, 256)))


def decode(bench: Bench[ContentBench]) -> None:
    content_decode.measure(bench)


def table(bench: Bench[ContentBench]) -> None:
    shown = content_table.tables(bench.file)
    if not shown:
        raise ValueError(f"{bench.file.path} holds no measurements; measure first, without --parts table")
    bench.say(shown)


PARTS: dict[str, Callable[[Bench[ContentBench]], None]] = {
    "speed": speed, "memory": memory, "decode": decode, "peers": peers, "table": table,
}  # fmt: skip
OPTIONS = ContentBench
