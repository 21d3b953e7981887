"""How far information travels through a pattern: over how many layers a token's influence reaches every other.

In one layer a query takes up what the keys it sees hold, and keeps what it has itself (the residual stream):

    R_1 = A ∪ identity        R_L = R_1 ∘ R_{L−1}        longest path: the least L for which R_L is all that may be

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


def longest_path(seen: Sequence[Sequence[bool]], *, causal: bool) -> Paths:
    """seen [n][n]: whether query i sees key j, in any head of a layer; every layer is alike."""
    n = len(seen)
    first = [sum(1 << j for j, sees in enumerate(row) if sees) | 1 << i for i, row in enumerate(seen)]
    reach, layers = first, 1
    while (further := [_through(row, reach) for row in first]) != reach:
        reach, layers = further, layers + 1
    allowed = n * (n + 1) // 2 if causal else n * n
    alone = all(row == 1 << i for i, row in enumerate(first))
    return Paths(0 if alone else layers, sum(row.bit_count() for row in reach), allowed)


def _through(row: int, reach: list[int]) -> int:
    """All that the keys of a row have reached before."""
    found = 0
    while row:
        lowest = row & -row
        found |= reach[lowest.bit_length() - 1]
        row ^= lowest
    return found
