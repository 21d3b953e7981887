"""What `bench content` measures: attention by content and by low rank, forward and with all gradients.

`python -m spanformer.bench.content_work JOB` measures peak memory in a process of its own (see `memory`).
Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention.bucketed import Bucketed
from spanformer.bench.linear_work import (
    SAME,
    SDPA,
    Checked,
    Contender,
    Inputs,
    check,
    make_kind,
    make_text,
    of_mechanism,
    to_dtype,
)
from spanformer.bench.memory import MIB, Peak, in_fresh_process
from spanformer.core.peak import peak_of

SHORT = 133
"""tokens over which the blocks of PyTorch are compared with all pairs"""


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    name: str
    kind: Callable[[int], str]
    """of a text of this many tokens, as run files write it"""
    aims: tuple[float, ...]
    """times as fast as SDPA, at `LENGTHS` of bench/content.py"""
    causal: bool = True
    most: float | None = None
    """times q that it may need beyond the inputs"""

    @property
    def yardstick(self) -> Contender:
        return SDPA if self.causal else BOTH_WAYS


def _both_ways(inputs: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(inputs["q"], inputs["k"], inputs["v"])


BOTH_WAYS = Contender(_both_ways)


def _buckets(length: int) -> int:
    return max(2, length // 64 // 2 * 2)


def _root(length: int) -> int:
    return max(2, round(length**0.5 / 2) * 2)


MEASURED = (
    Measured("LSH, 4 rounds, buckets of 64, w 128", lambda n: f"lsh(128, {_buckets(n)}, 4)", (1.1, 1.7, 3.2, 6, 12),
             most=9),
    Measured("LSH, 1 round", lambda n: f"lsh(128, {_buckets(n)}, 1)", (3.8, 5.5, 10, 20, 40)),
    Measured("routing, w = k = √T", lambda n: f"routing({_root(n)}, {_root(n)})", (5, 7, 11, 18, 32)),
    Measured("Linformer 256, both directions", lambda n: f"linformer({min(256, n)}, {n}, key_value)",
             (1.5, 3, 6, 12, 24), causal=False, most=5),
)  # fmt: skip


def check_content(kind: str, inputs: Inputs) -> Checked:
    """Compare what will be timed with the same mechanism's blocks in PyTorch, in float64 and with the same buckets;
    `prove_blocks` compares these with all pairs."""
    got = of_mechanism(make_kind(kind, inputs["q"].shape[2])).step(inputs)
    exact, plain = (_alike(kind, inputs, dtype, "banded") for dtype in (torch.float64, torch.float32))
    return check(got, exact, plain)


@functools.cache
def prove_blocks(kind: str) -> None:
    """A ValueError if a kind's blocks in PyTorch differ from all pairs, in float64."""
    inputs = make_text(SHORT)
    blocks, exact = (_alike(kind, inputs, torch.float64, backend) for backend in ("banded", "reference"))
    for name, right in exact.items():
        off = float((blocks[name] - right).abs().max() / right.abs().max().clamp(min=1e-3))
        if not off < SAME:
            raise ValueError(
                f"{name} of {kind} in blocks differs from all pairs by {off:.2g} of the largest value, in float64; "
                f"expected below {SAME:g}"
            )


def _alike(kind: str, inputs: Inputs, dtype: torch.dtype, backend: str) -> Inputs:
    """A step in this dtype, on this backend, with the buckets that float32 gives."""
    mechanism = make_kind(kind, inputs["q"].shape[2])
    if isinstance(mechanism, Bucketed):
        with torch.no_grad():
            ids = mechanism.hashed(mechanism.queries(inputs["q"]))
        mechanism.hashed = lambda x: ids
    mechanism.backend = backend
    return of_mechanism(mechanism.to(dtype)).step(to_dtype(inputs, dtype))


def peak_memory(kind: str, length: int, threads: int) -> Peak:
    """Of forward and backward beyond the inputs."""
    job = {"kind": kind, "length": length, "threads": threads}
    return in_fresh_process("spanformer.bench.content_work", job, threads)


def _measure(kind: str, length: int, threads: int) -> Peak:
    torch.set_num_threads(threads)
    contender, small = of_mechanism(make_kind(kind, length)), make_text(256)
    contender.step(small)  # loads what is loaded at first use, and starts the threads
    inputs = make_text(length)
    peak, seconds = peak_of(lambda: contender.step(inputs))
    return Peak(peak / MIB, seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(**json.loads(sys.argv[1])))))
