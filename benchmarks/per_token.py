"""Does the time per token stay the same as the sequence grows, when every head sees 64 tokens?

All lengths are timed in turn, round by round, so that a slow minute of the machine hits them alike; a length's figure
is the median over rounds of its time per token relative to the mean over lengths in that round. Prints a table.

    python benchmarks/per_token.py [ROUNDS]
"""

from __future__ import annotations

import statistics
import sys

import torch

from spanformer.bench.contenders import NATIVE, runner
from spanformer.bench.timing import Patience, round_robin
from spanformer.bench.work import Work, make_inputs
from spanformer.core.malloc import keep_freed_memory

LENGTHS = [1024 * 2**n for n in range(7)]


def main(rounds: int) -> None:
    torch.set_num_threads(2)
    keep_freed_memory(True)
    functions = {}
    for length in LENGTHS:
        inputs = make_inputs(Work("S", length, "forward+backward", 1, 8, 64, "plain", "float32"))
        functions[length] = runner(NATIVE, inputs, NATIVE.build(inputs))
    timings = round_robin(functions, repeats=rounds, shortest=0.3, budget=1e9, patience=Patience(300.0))
    per_token = [[timings[length].samples[r] / length for length in LENGTHS] for r in range(rounds)]
    relative = [[time / statistics.mean(row) for time in row] for row in per_token]
    medians = [statistics.median(row[i] for row in relative) for i in range(len(LENGTHS))]
    print("length    µs/token   relative")
    for i, length in enumerate(LENGTHS):
        print(f"{length:6}    {1e6 * statistics.median(row[i] for row in per_token):8.3f}   {medians[i]:8.3f}")
    print(f"longest over shortest time per token: {max(medians) / min(medians):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
