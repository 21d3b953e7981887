"""Rank correlation."""

from __future__ import annotations

from collections.abc import Sequence


def ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, counted from 0; equal values share the mean of their ranks."""
    return [sum(a < b for a in values) + (list(values).count(b) - 1) / 2 for b in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """The correlation of the ranks of x and y; 0 if all values of one are equal."""
    a, b = ranks(x), ranks(y)
    mean = (len(a) - 1) / 2
    spread = sum((u - mean) ** 2 for u in a) * sum((v - mean) ** 2 for v in b)
    return sum((u - mean) * (v - mean) for u, v in zip(a, b, strict=True)) / spread**0.5 if spread else 0.0
