"""A batch of environments that step together in numpy. A row whose episode ends begins the next one at once.

Shapes: N rows, O numbers of an observation.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Step(NamedTuple):
    observation: np.ndarray
    """[N, O] float32; after the end of an episode, the first one of the next"""
    reward: np.ndarray
    """[N] float32"""
    terminated: np.ndarray
    """[N] bool: the episode ended, and no reward follows"""
    truncated: np.ndarray
    """[N] bool: the episode was cut, and rewards would have followed"""
    final: np.ndarray
    """[N, O] the observation before any new episode"""
    success: np.ndarray
    """[N] 1 or 0 for an episode that ended with a right or wrong answer; NaN: unknown"""


class BatchEnv(Protocol):
    name: str
    rows: int
    observation: int
    """O"""
    actions: int

    def seed(self, seed: int) -> None:
        """Draw what follows from this seed; the episodes under way continue."""
        ...

    def reset(self) -> np.ndarray: ...

    def step(self, action: np.ndarray) -> Step: ...

    def arrays(self) -> dict[str, np.ndarray] | None:
        """All that the episodes under way depend on; None: it cannot be saved."""
        ...

    def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """Continue from `arrays()`: the observation [N, O]."""
        ...


class Rows:
    """The base of the environments written here. `state` names the arrays [N, ...] of the episodes under way."""

    observation: int
    actions: int
    state: tuple[str, ...]

    def __init__(self, name: str, rows: int, length: int) -> None:
        if length < 1 or rows < 1:
            raise ValueError(f"{name} has length {length} and {rows} rows; expected at least 1 each")
        self.name, self.rows, self.length = name, rows, length
        self.seed(0)

    def seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def reset(self) -> np.ndarray:
        self._begin(np.ones(self.rows, bool))
        return self.see()

    def see(self) -> np.ndarray:
        raise NotImplementedError

    def arrays(self) -> dict[str, np.ndarray] | None:
        return {name: getattr(self, name).copy() for name in self.state}

    def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        for name in self.state:
            getattr(self, name)[:] = arrays[name]
        return self.see()

    def _begin(self, which: np.ndarray) -> None:
        """Begin an episode in these rows [N] bool."""
        raise NotImplementedError

    def _end(self, reward: np.ndarray, over: np.ndarray, cut: np.ndarray, right: np.ndarray) -> Step:
        """The step's result, and the next episode of the rows that ended."""
        final = self.see()
        ended = over | cut
        if ended.any():
            self._begin(ended)
        success = np.where(ended, (over & right).astype(np.float32), np.nan)
        return Step(self.see() if ended.any() else final, reward.astype(np.float32), over, cut, final, success)


class Memory(Rows):
    """The base of tasks in which a row sees a cue [N] of 0 or 1 at time 0 only, and must answer it at the end."""

    state = "cue", "time", "place"

    def __init__(self, name: str, rows: int, length: int) -> None:
        super().__init__(name, rows, length)
        self.cue, self.time, self.place = (np.zeros(rows, np.int64) for _ in range(3))

    def _begin(self, which: np.ndarray) -> None:
        self.cue = np.where(which, self.random.integers(0, 2, self.rows), self.cue)
        self.time = np.where(which, 0, self.time)
        self.place = np.where(which, 0, self.place)
