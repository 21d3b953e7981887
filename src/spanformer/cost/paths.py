"""How far information travels through a pattern: after how many layers every token has reached every other.

In one layer a query receives information from the keys it sees and keeps its own (the residual stream):

    R_L = (A_L ∪ identity) ∘ R_{L−1}        longest path: the least L for which R_L is all that may be

Rows are sets of keys as the bits of a whole number, so a product of two matrices is a few hundred "or"s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Paths(NamedTuple):
    layers: int
    """after which nothing more is reached"""
    reached: int
    """pairs of query and key with a path between them, each token with itself among them"""
    allowed: int
    """pairs that could have one: all, or those with a key no later than the query"""

    @property
    def whole(self) -> bool:
        """Whether every token is reached that may be."""
        return self.reached == self.allowed


def longest_path(layers: Sequence[Sequence[Sequence[bool]]], *, causal: bool) -> Paths:
    """layers: of each, [n][n] whether query i sees key j, in any of its heads; they take turns, or one is all."""
    n = len(layers[0])
    sets = [
        [sum(1 << j for j, sees in enumerate(row) if sees) | 1 << i for i, row in enumerate(seen)] for seen in layers
    ]
    reach, passed, last = [1 << i for i in range(n)], 0, 0
    while passed - last < len(layers):  # a turn of all in which nothing is new is the end
        further = [_through(row, reach) for row in sets[passed % len(layers)]]
        passed += 1
        if further != reach:
            reach, last = further, passed
    allowed = n * (n + 1) // 2 if causal else n * n
    return Paths(last, sum(row.bit_count() for row in reach), allowed)


def _through(row: int, reach: list[int]) -> int:
    """All that the keys of a row have reached before."""
    found = 0
    while row:
        lowest = row & -row
        found |= reach[lowest.bit_length() - 1]
        row ^= lowest
    return found
