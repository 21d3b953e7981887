"""`spanformer bench per-token`: measure whether the time per token stays constant as the sequence grows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spanformer.bench.contenders import NATIVE, runner, unusable_backend
from spanformer.bench.session import Bench, BenchOptions
from spanformer.bench.timing import Timing
from spanformer.bench.work import Work, make_inputs

LENGTHS, QUICK_LENGTHS = tuple(1024 * 2**n for n in range(7)), (256, 512)


@dataclass(frozen=True)
class PerTokenBench(BenchOptions):
    """Measure the time per token of the native kernel, forward and backward, at lengths from 1,024 to 65,536. Every
    head sees 64 tokens.

        spanformer bench per-token --rounds 9

    All lengths are timed in turn, so that a slow minute of the machine affects all of them. The result of a length is
    the median over rounds of its time per token, relative to the mean over lengths in that round.
    """

    rounds: int = 9
    """Rounds; each times all lengths in turn, and results are medians over rounds."""
    budget: float = 600.0
    """Seconds for all rounds: after this time no new round begins, once two are done. Up to a third is spent on
    waiting and repeating when other processes disturb a measurement."""
    lengths: tuple[int, ...] = ()
    """Sequence lengths. Default: 1024 2048 … 65536 (with --quick: 256 512)."""


OPTIONS = PerTokenBench


def run(bench: Bench[PerTokenBench]) -> None:
    if reason := unusable_backend("native"):
        raise ValueError(f"the native kernel cannot be timed: {reason}")
    lengths = bench.options.lengths or (QUICK_LENGTHS if bench.options.quick else LENGTHS)
    functions = {}
    bench.plan(1)
    for length in lengths:
        inputs = make_inputs(Work("S", length, "forward+backward", 1, 8, 64, "plain", "float32"))
        functions[str(length)] = runner(NATIVE, inputs, NATIVE.build(inputs))
    times = bench.compare("time per token", functions, shortest=0.3)
    relative = relative_per_token(times, lengths)
    rows = [
        {"length": length, "us_per_token": 1e6 * times[str(length)].median / length, "relative": share}
        for length, share in zip(lengths, relative, strict=True)
    ]
    bench.keep("per_token", rows)
    bench.say("length    µs/token   relative")
    for row in rows:
        bench.say(f"{row['length']:6}    {row['us_per_token']:8.3f}   {row['relative']:8.3f}")
    bench.say(f"longest over shortest time per token: {max(relative) / min(relative):.3f}")


def relative_per_token(times: Mapping[str, Timing], lengths: Sequence[int]) -> list[float]:
    """For each length, the median over rounds of its time per token relative to the mean over lengths in that round."""
    rounds = min(len(times[str(length)].samples) for length in lengths)
    per_token = [[times[str(length)].samples[r] / length for length in lengths] for r in range(rounds)]
    relative = [[time / statistics.mean(row) for time in row] for row in per_token]
    return [statistics.median(row[i] for row in relative) for i in range(len(lengths))]
