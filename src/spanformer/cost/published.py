"""A textbook chapter's tables of attention variants, compared with our figures; differences are explained.

The chapter "Attention Variants and Mechanisms" (deeplearning.hofkensvermeulen.be) gives, for d = 768, 12 heads of 64
and float32, the memory of attention matrices at four lengths, and the operations of one layer at 8,192 tokens, for
attention in both directions. Our figures come from `spanformer.cost.mechanisms` at the same sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

HEADS, HEAD_DIM, ITEM = 12, 64, 4
LENGTHS = (512, 4096, 8192, 16384)
LAYER = 8192
"""the length of its table of operations"""
WINDOW, RANK = 256, 256
AGREE = 0.02
"""its figures have two or three digits"""
MB, BILLION = 1e6, 1e9


@dataclass(frozen=True)
class Figure:
    what: str
    """the chapter's name of the mechanism"""
    length: int
    theirs: float
    ours: float
    unit: str
    reason: str
    """why the figures differ, or what both count"""

    @property
    def agrees(self) -> bool:
        return abs(self.theirs / self.ours - 1) <= AGREE


def memory_figures() -> list[Figure]:
    """Megabytes (10⁶) of attention matrices of all heads, at each length."""
    return [
        Figure(what, n, theirs, HEADS * ITEM * numbers(n) / MB, "MB", reason)
        for what, (figures, numbers, reason) in _MEMORY.items()
        for n, theirs in zip(LENGTHS, figures, strict=True)
    ]


def flops_figures() -> list[Figure]:
    """Billions of operations of one layer forward, projections aside, at 8,192 tokens."""
    return [
        Figure(what, LAYER, theirs, HEADS * operations(LAYER) / BILLION, "GFLOP", reason)
        for what, (theirs, operations, reason) in _FLOPS.items()
    ]


def _root(n: int) -> float:
    """√n, the keys that the chapter's sparse attention sees."""
    return math.sqrt(n)


Numbers = Callable[[int], float]
_MEMORY: dict[str, tuple[tuple[float, ...], Numbers, str]] = {
    "full": ((12.6, 805, 3200, 12900), lambda n: n * n, "n² weights a head"),
    "local, w = 256": ((6.3, 50.3, 101, 201), lambda n: n * WINDOW, "n·w weights a head, edges counted whole"),
    "sparse, √n": ((1.1, 12.6, 35.7, 101), lambda n: n * _root(n), "n·√n weights a head; theirs at 512 is twice that"),
    "linear": (
        (0.3, 2.3, 4.7, 9.4),
        lambda n: HEAD_DIM * (HEAD_DIM + 1),
        "theirs grows by about 574 bytes a token; the state φ(K)ᵀV and its normaliser, D·(D + 1) numbers a head, "
        "are the same at every length. (Elsewhere the chapter says 28.3 MB and 14 MB for it, taking d for D.)",
    ),
    "low rank, r = 256": ((6.3, 50.3, 101, 201), lambda n: n * RANK, "n·r weights a head"),
}
_ONE = "one product of the two, a multiply and its add as one, in units of 2³⁰"
_FLOPS: dict[str, tuple[float, Numbers, str]] = {
    "full": (
        48.3,
        lambda n: 4 * n * n * HEAD_DIM,
        f"theirs is about n²·d = 48·2³⁰: {_ONE}; q·k and p·v are two products, each 2·n²·d",
    ),
    "local, w = 256": (
        3.0,
        lambda n: 4 * n * WINDOW * HEAD_DIM,
        "theirs is 2·n·w·d = 3·2³⁰, half of both products, while full attention is counted as a quarter: the speed-up "
        "is n/w = 32 times, not 16",
    ),
    "sparse, √n": (
        6.0,
        lambda n: 4 * n * _root(n) * HEAD_DIM,
        "theirs is an eighth of full attention; a query that sees √8192 ≈ 90.5 keys costs n/√n = 90 times less, not 8",
    ),
    "linear": (
        4.5,
        lambda n: 4 * n * HEAD_DIM * HEAD_DIM,
        "theirs is n·d² = 4.5·2³⁰ with d = 768, as if one head had the whole width; 12 heads of 64 have n·D² each, "
        "two products",
    ),
    "low rank, r = 256": (
        3.0,
        lambda n: 8 * n * RANK * HEAD_DIM,
        "theirs is 2·n·r·d = 3·2³⁰; ours has both products and the two projections along the text, which are as much "
        "again and not negligible",
    ),
}
