"""Follow pointers: the more hops a question asks for, the more layers its answer needs.

    p(0) p(1) … p(n−1)            4 s [p(p(p(p(s))))]   1 t [p(t)] …
    b p(b)  a p(a)  d p(d) …      with `named`: each pointer after its node, in random order

p is one cycle through `nodes` nodes, so no two numbers of hops below `nodes` give the same answer. A question is a
number of hops, 1 … `hops`, fewer more often, and the node to begin at. Nodes are tokens from 32 on.
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
        return self.given + 3 * self.questions

    @property
    def given(self) -> int:
        """Tokens before the questions."""
        return self.nodes * (1 + self.named)

    def answers(self) -> np.ndarray:
        at = np.arange(self.length) - self.given
        return (at >= 0) & (at % 3 == 2)

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
        asked = np.stack([hops, FIRST_NODE + start, FIRST_NODE + end], -1).reshape(count, -1)
        if self.named:
            order = without_repeats(draw, count, self.nodes, self.nodes)
            pairs = np.stack([order, np.take_along_axis(pointers, order, 1)], -1)
            pointers = pairs.reshape(count, -1)
        return np.concatenate([FIRST_NODE + pointers, asked], 1).astype(np.uint8)
