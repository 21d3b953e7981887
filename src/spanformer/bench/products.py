"""`spanformer bench products`: time the matrix products of a training step by MKL (PyTorch) and oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from spanformer.bench.session import Bench, BenchOptions
from spanformer.model import linear

SHAPES = ((256, 256), (256, 1024), (1024, 256), (512, 512), (512, 2048), (2048, 512))


@dataclass(frozen=True)
class ProductsBench(BenchOptions):
    """Time the matrix products of a training step, forward and backward, by MKL and by oneDNN, in GFLOP/s.

        spanformer bench products --rounds 40

    This needs a processor on which spanformer uses oneDNN (not Intel's).
    """

    rounds: int = 40
    """Rounds; each times both libraries in turn, and results are medians over rounds."""
    rows: int = 0
    """Tokens per batch. Default: 2048 (with --quick: 64)."""


OPTIONS = ProductsBench


def run(bench: Bench[ProductsBench]) -> None:
    if linear._onednn is None:
        bench.say("this processor uses MKL only; there is nothing to compare")
        return
    rows, found = bench.options.rows or bench.options.size(2048, 64), []
    bench.plan(2 * len(SHAPES))
    bench.say(f"{rows} rows, {bench.options.threads} threads, float32, GFLOP/s as MKL → oneDNN")
    for inputs, outputs in SHAPES:
        x, weight, g = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        forward = partial(F.linear, x, weight), partial(linear._run, x, weight, None, "none")
        backward = partial(torch.matmul, g, weight), partial(linear._run, g, weight.t(), None, "none")
        work = 2e-9 * rows * inputs * outputs
        for name, (mkl, onednn) in {"y = x·Wᵀ": forward, "∂x = g·W": backward}.items():
            title = f"{inputs} → {outputs} {name}"
            times = bench.compare(title, {"mkl": mkl, "onednn": onednn}, shortest=0.02)
            rates = {library: work / timing.median for library, timing in times.items()}
            ratio = times["onednn"].times_as_fast_as(times["mkl"])
            found.append(
                {"inputs": inputs, "outputs": outputs, "product": name, "gflops": rates, "times_as_fast": ratio}
            )
            shown = f"{rates['mkl']:5.0f} → {rates['onednn']:<5.0f}"
            bench.say(f"{inputs:>5} → {outputs:<5} {name}  {shown} {ratio:.2f} times")
    bench.keep("products", found)
