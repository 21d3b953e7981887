"""Products of a training step, PyTorch's own (MKL) and oneDNN's side by side: GFLOP/s, medians.

python benchmarks/products.py
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
import torch.nn.functional as F

from spanformer.model import linear

ROWS, ROUNDS, THREADS = 2048, 40, 2


def main() -> None:
    torch.set_num_threads(THREADS)
    if linear._onednn is None:
        raise SystemExit("this processor's products are MKL's: there is nothing to compare")
    print(f"{ROWS} rows, {THREADS} threads, float32, GFLOP/s as MKL → oneDNN")
    for inputs, outputs in ((256, 256), (256, 1024), (1024, 256), (512, 512), (512, 2048), (2048, 512)):
        x, weight, g = torch.randn(ROWS, inputs), torch.randn(outputs, inputs), torch.randn(ROWS, outputs)
        forward = in_turn(partial(F.linear, x, weight), partial(linear._run, x, weight, None, "none"))
        backward = in_turn(partial(torch.matmul, g, weight), partial(linear._run, g, weight.t(), None, "none"))
        work = 2e-9 * ROWS * inputs * outputs
        for name, (mkl, onednn) in {"y = x·Wᵀ": forward, "∂x = g·W": backward}.items():
            rates = f"{work / mkl:5.0f} → {work / onednn:<5.0f}"
            print(f"{inputs:>5} → {outputs:<5} {name}  {rates} {mkl / onednn:.2f} times")


def in_turn(a, b) -> tuple[float, float]:
    """Median seconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, seconds in zip((a, b), times, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return statistics.median(times[0][5:]), statistics.median(times[1][5:])


if __name__ == "__main__":
    main()
