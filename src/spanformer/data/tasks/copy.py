"""Copy a word that was read some way back.

    filler … 0 w … filler … 0 [w]

w has `symbols` different symbols; each is `distance` tokens before its copy. The copy is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import DistanceTask, put, without_repeats

FIRST_FILLER, END = 96, 128


@dataclass(frozen=True)
class Copy(DistanceTask):
    name = "copy"

    symbols: int = 16

    def __post_init__(self) -> None:
        self.require(1 <= self.symbols < FIRST_FILLER, "symbols", f"1 … {FIRST_FILLER - 1}, as none comes twice")
        self.check_distances(self.symbols + 1)

    @property
    def length(self) -> int:
        return self.distance + self.symbols + 1

    def answers(self) -> np.ndarray:
        return np.arange(self.length) > self.distance

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        texts = draw.integers(FIRST_FILLER, END, (count, self.length), np.uint8)
        word = np.pad(1 + without_repeats(draw, count, FIRST_FILLER - 1, self.symbols), ((0, 0), (1, 0)))
        put(texts, self.distance - self.distances(draw, count), word)
        texts[:, self.distance :] = word
        return texts
