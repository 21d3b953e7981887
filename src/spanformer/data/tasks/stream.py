"""The texts of a task as batches that a checkpoint can resume.

Shapes: N texts, T tokens of a text.
"""

from __future__ import annotations

import numpy as np

from spanformer.data.lanes import saved_place
from spanformer.data.tasks.base import Task


class TaskStream:
    """Endless batches of `lanes` texts for training, shuffled by (seed, epoch). `rows`: this process's rows of a batch
    that several processes share."""

    def __init__(self, texts: np.ndarray, lanes: int, *, seed: int = 0, rows: slice | None = None) -> None:
        if len(texts) < lanes:
            raise ValueError(f"there are {len(texts)} texts to train on; expected at least a batch of {lanes}")
        self.texts, self.lanes, self.seed, self.rows = texts, lanes, seed, rows or slice(None)
        self.epoch = self.position = 0
        self._order = (-1, np.empty(0, np.int64))

    def __iter__(self) -> TaskStream:
        return self

    def __next__(self) -> np.ndarray:
        """[rows, T] int64"""
        if self.position == len(self.texts) // self.lanes:
            self.epoch, self.position = self.epoch + 1, 0
        if self._order[0] != self.epoch:
            draw = np.random.default_rng([self.seed, self.epoch])
            self._order = (self.epoch, draw.permutation(len(self.texts)))
        chosen = self._order[1][self.position * self.lanes : (self.position + 1) * self.lanes]
        self.position += 1
        return self.texts[chosen[self.rows]].astype(np.int64)

    def state(self) -> dict[str, int]:
        """Position and shape of the stream, for a checkpoint."""
        return {"epoch": self.epoch, "position": self.position, **self._shape()}

    def load(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken."""
        self.epoch, self.position = saved_place(state, self._shape(), len(self.texts) // self.lanes)

    def _shape(self) -> dict[str, int]:
        return {"texts": len(self.texts), "lanes": self.lanes, "seed": self.seed}


def texts_of(task: Task, ids: np.ndarray, name: str) -> np.ndarray:
    """[N, T] of a split's ids; an incomplete last text is dropped. name: of the split, for errors."""
    count = len(ids) // task.length
    if not count:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and a text of the task {task.name} has {task.length}; raise data.limit"
        )
    return ids[: count * task.length].reshape(count, task.length)
