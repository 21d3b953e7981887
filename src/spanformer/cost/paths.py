"""Longest path of a pattern: the number of layers after which every token has received information from every other.

In one layer a query receives information from the keys it sees and keeps its own (the residual stream):

    R_L = (A_L ∪ identity) ∘ R_{L−1}        longest path: the smallest L for which R_L holds every allowed pair

A row is a set of keys, stored as the bits of an int, so a product of two matrices is a few hundred bitwise ors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Paths(NamedTuple):
    layers: int
    """number of layers after which R no longer changes"""
    reached: int
    """query–key pairs with a path between them, including each token with itself"""
    allowed: int
    """allowed pairs: all, or if causal those with a key no later than the query"""

    @property
    def whole(self) -> bool:
        """Whether every allowed pair has a path."""
        return self.reached == self.allowed


def longest_path(layers: Sequence[Sequence[Sequence[bool]]], *, causal: bool) -> Paths:
    """layers: for each layer, [n][n] whether query i sees key j in any head; the stack repeats them in turn."""
    n = len(layers[0])
    sets = [
        [sum(1 << j for j, sees in enumerate(row) if sees) | 1 << i for i, row in enumerate(seen)] for seen in layers
    ]
    reach, passed, last = [1 << i for i in range(n)], 0, 0
    while passed - last < len(layers):  # stop when a round of all layers adds nothing
        further = [_through(row, reach) for row in sets[passed % len(layers)]]
        passed += 1
        if further != reach:
            reach, last = further, passed
    allowed = n * (n + 1) // 2 if causal else n * n
    return Paths(last, sum(row.bit_count() for row in reach), allowed)


def _through(row: int, reach: list[int]) -> int:
    """The union of what the keys of a row have reached."""
    found = 0
    while row:
        lowest = row & -row
        found |= reach[lowest.bit_length() - 1]
        row ^= lowest
    return found
