"""Reformer's task: Reformer (Kitaev et al., 2020), §5. https://arxiv.org/abs/2001.04451

    0 w 0 [w]

w has `symbols` symbols from 1 … 127, each drawn by itself, so the same may come again and the place decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import Task


@dataclass(frozen=True)
class Duplicate(Task):
    name = "duplicate"

    symbols: int = 127

    def __post_init__(self) -> None:
        self.require(1 <= self.symbols <= 1 << 16, "symbols", f"1 … {1 << 16:,}")

    @property
    def length(self) -> int:
        return 2 * (self.symbols + 1)

    def answers(self) -> np.ndarray:
        return np.arange(self.length) > self.symbols + 1

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        word = np.pad(draw.integers(1, 128, (count, self.symbols), np.uint8), ((0, 0), (1, 0)))
        return np.concatenate([word, word], 1)
