"""A covering array: few of many combinations, so that every pair of values that occurs in one of them still occurs."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def covering(rows: Sequence[Row], seed: int = 0) -> list[Row]:
    """Greedy: again and again the row with the most pairs that no chosen row has; ties are drawn by the seed. A row
    gains less the more are chosen, so that a count from before is an upper bound and is only renewed at the top."""
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    pairs = [set(combinations(enumerate(row), 2)) for row in rows]
    heap = [(-len(pairs[n]), place, n) for place, n in enumerate(order)]
    heapq.heapify(heap)
    covered: set[tuple] = set()
    chosen = []
    while heap:
        before, place, n = heapq.heappop(heap)
        gain = len(pairs[n] - covered)
        if gain == -before:
            covered |= pairs[n]
            chosen.append(n)
        elif gain:
            heapq.heappush(heap, (-gain, place, n))
    return [rows[n] for n in sorted(chosen)]
