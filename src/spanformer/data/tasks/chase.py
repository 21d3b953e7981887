"""Follow pointers: the more hops a question asks for, the more layers its answer needs.

    p(0) p(1) … p(n−1)               4 s [p(p(p(p(s))))]   1 t [p(t)] …
    0 b p(b)  0 a p(a)  0 d p(d) …   0 s 4 [p(p(p(p(s))))]   0 t 1 [p(t)] …       with `named`

With `named`, pointers stand in random order, each after the name of its node; zeros separate them, so that only a
pointer stands after a node. p is one cycle through `nodes` nodes, so no two numbers of hops below
`nodes` give the same answer. A question is a number of hops, 1 … `hops`, fewer more often, and the node to begin at.
Nodes are tokens from 32 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import Task, without_repeats

FIRST_NODE, MOST = 32, 96


@dataclass(frozen=True)
class Chase(Task):
    name = "chase"

    nodes: int = 8
    hops: int = 6
    questions: int = 8
    fewest: int = 1
    """fewest hops of a question"""
    named: int = 0
    """1: pointers follow the names of their nodes; 0: a pointer's place is its node"""

    def __post_init__(self) -> None:
        self.require(2 <= self.nodes <= MOST, "nodes", f"2 … {MOST}")
        most = min(self.nodes, FIRST_NODE) - 1
        self.require(1 <= self.hops <= most, "hops", f"1 … {most}, less than nodes and {FIRST_NODE}")
        self.require(1 <= self.fewest <= self.hops, "fewest", f"1 … hops, {self.hops}")
        self.require(1 <= self.questions <= 1 << 12, "questions", f"1 … {1 << 12:,}")
        self.require(0 <= self.named <= 1, "named", "0 or 1")

    @property
    def length(self) -> int:
        return self.given + (3 + self.named) * self.questions

    @property
    def given(self) -> int:
        """Tokens before the questions."""
        return self.nodes * (3 if self.named else 1)

    def answers(self) -> np.ndarray:
        at = np.arange(self.length) - self.given
        return (at >= 0) & (at % (3 + self.named) == 2 + self.named)

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        cycle = without_repeats(draw, count, self.nodes, self.nodes)
        pointers = np.empty_like(cycle)
        np.put_along_axis(pointers, cycle, np.roll(cycle, -1, 1), 1)
        shape = (count, self.questions)
        # on a logarithmic scale: a model learns many hops once it knows a few
        logs = draw.uniform(np.log(self.fewest), np.log(self.hops + 1), shape)
        hops = np.clip(np.exp(logs).astype(np.int64), self.fewest, self.hops)
        place = draw.integers(self.nodes, size=shape)
        start = np.take_along_axis(cycle, place, 1)
        end = np.take_along_axis(cycle, (place + hops) % self.nodes, 1)
        start, end, pointers = (FIRST_NODE + each for each in (start, end, pointers))
        if not self.named:
            return np.concatenate([flat(pointers), flat(hops, start, end)], 1)
        names = without_repeats(draw, count, self.nodes, self.nodes)
        zeros = np.zeros_like(names), np.zeros_like(hops)
        pairs = flat(zeros[0], FIRST_NODE + names, np.take_along_axis(pointers, names, 1))
        return np.concatenate([pairs, flat(zeros[1], start, hops, end)], 1)


def flat(*columns: np.ndarray) -> np.ndarray:
    """[N, n] each → [N, n · columns] uint8: the first of each column, then the second of each, …"""
    return np.stack(columns, -1).reshape(len(columns[0]), -1).astype(np.uint8)
