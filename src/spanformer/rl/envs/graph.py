"""Shortest paths in a random graph, after Chen et al. (2021), section 2, https://arxiv.org/abs/2106.01345

A connected graph of 20 nodes, in which 1 of 10 pairs has an edge; it and its goal are the same in every episode. An
episode begins in any other node. Each step takes an edge and pays −1; the goal ends the episode. So the best return of
a start is minus its distance, and random steps are a random walk. An episode that has not reached the goal after
`length` steps ends and pays −`length` more: otherwise the return-to-go of its last steps would be that of nodes beside
the goal.

Shapes: N rows, V nodes.
"""

from __future__ import annotations

import functools

import numpy as np

from spanformer.rl.envs.batch import Rows, Step

NODES, SHARE, SEED = 20, 0.1, 7


@functools.cache
def edges() -> np.ndarray:
    """[V, V] bool, symmetric: the first connected graph that the seed draws."""
    random = np.random.default_rng(SEED)
    while True:
        upper = np.triu(random.random((NODES, NODES)) < SHARE, 1)
        joined = upper | upper.T
        if (distances_to(joined, 0) < NODES).all():
            return joined


def distances_to(joined: np.ndarray, goal: int) -> np.ndarray:
    """[V] steps of the shortest path from each node to the goal; V: there is none."""
    found = np.full(len(joined), len(joined))
    found[goal] = 0
    for steps in range(1, len(joined)):
        found[(found == len(joined)) & joined[:, found == steps - 1].any(1)] = steps
    return found


@functools.cache
def distances() -> np.ndarray:
    """[V] to the goal, node 0."""
    return distances_to(edges(), 0)


class Graph(Rows):
    observation = NODES
    state = "node", "time"

    def __init__(self, rows: int, length: int = 50) -> None:
        super().__init__("graph", rows, length)
        neighbours = [np.flatnonzero(row) for row in edges()]
        self.actions = max(len(each) for each in neighbours)
        # action a takes edge a modulo the number of edges of the node
        self.next = np.array([[each[a % len(each)] for a in range(self.actions)] for each in neighbours])
        self.node, self.time = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def see(self) -> np.ndarray:
        """[N, V], one-hot."""
        return np.eye(NODES, dtype=np.float32)[self.node]

    def step(self, action: np.ndarray) -> Step:
        self.node, self.time = self.next[self.node, action], self.time + 1
        there = self.node == 0
        late = ~there & (self.time >= self.length)
        return self._end(np.where(late, -1.0 - self.length, -1.0), there | late, np.zeros(self.rows, bool), there)

    def _begin(self, which: np.ndarray) -> None:
        self.node = np.where(which, self.random.integers(1, NODES, self.rows), self.node)
        self.time = np.where(which, 0, self.time)
