"""Follow pointers: the more hops a question asks for, the more layers its answer needs.

    p(0) p(1) … p(n−1)      4 s [p(p(p(p(s))))]   1 t [p(t)] …

With `search`, the list holds the inverse of p: the next node after s is the place where s stands, so a hop is a search
for a value, which attention does by itself. p is one cycle through `nodes` nodes, so no two numbers of hops below
`nodes` give the same answer. A question is a number of hops, 1 … `hops`, fewer more often, and the node to begin at.
Nodes are tokens from 32 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import Task, on_log_scale, without_repeats

FIRST_NODE, MOST = 32, 96


@dataclass(frozen=True)
class Chase(Task):
    name = "chase"

    nodes: int = 8
    hops: int = 6
    questions: int = 8
    fewest: int = 1
    """fewest hops of a question"""
    search: int = 0
    """1: the list holds the node before each node, and a hop is a search for a value; 0: the node after it"""

    def __post_init__(self) -> None:
        self.require(2 <= self.nodes <= MOST, "nodes", f"2 … {MOST}")
        most = min(self.nodes, FIRST_NODE) - 1
        self.require(1 <= self.hops <= most, "hops", f"1 … {most}, less than nodes and {FIRST_NODE}")
        self.require(1 <= self.fewest <= self.hops, "fewest", f"1 … hops, {self.hops}")
        self.require(1 <= self.questions <= 1 << 12, "questions", f"1 … {1 << 12:,}")
        self.require(0 <= self.search <= 1, "search", "0 or 1")

    @property
    def length(self) -> int:
        return self.nodes + 3 * self.questions

    def answers(self) -> np.ndarray:
        at = np.arange(self.length) - self.nodes
        return (at >= 0) & (at % 3 == 2)

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        cycle = without_repeats(draw, count, self.nodes, self.nodes)
        after, listed = np.roll(cycle, -1, 1), np.empty_like(cycle)
        np.put_along_axis(listed, after if self.search else cycle, cycle if self.search else after, 1)
        shape = (count, self.questions)
        hops = on_log_scale(draw, self.fewest, self.hops, shape)
        place = draw.integers(self.nodes, size=shape)
        start = np.take_along_axis(cycle, place, 1)
        end = np.take_along_axis(cycle, (place + hops) % self.nodes, 1)
        questions = np.stack([hops, FIRST_NODE + start, FIRST_NODE + end], -1)
        return np.concatenate([FIRST_NODE + listed, questions.reshape(count, -1)], 1).astype(np.uint8)
