"""Repeat a word, or reverse it: Universal Transformers (Dehghani et al., 2018), §3.2. https://arxiv.org/abs/1807.03819

    0 0 0 w 0 [w 0 0]        0 0 0 w 0 [w backwards 0 0]

w has up to `symbols` different symbols, at least `fewest`, fewer more often; with `fewest` 0 always `symbols`. Zeros
fill the text; those after a word are answers too, so a model must also learn where it ends. Trained on short words,
evaluated on longer ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import Task, on_log_scale, without_repeats

KNOWN = 127
"""different symbols, 1 … 127"""


@dataclass(frozen=True)
class Repeat(Task):
    name = "repeat"
    version = 2

    symbols: int = 40
    fewest: int = 0

    def __post_init__(self) -> None:
        self.require(1 <= self.symbols <= KNOWN, "symbols", f"1 … {KNOWN}, as none comes twice")
        self.require(
            0 <= self.fewest <= self.symbols, "fewest", f"0, for `symbols` in all texts, or 1 … {self.symbols}"
        )

    @property
    def length(self) -> int:
        return 2 * (self.symbols + 1)

    def answers(self) -> np.ndarray:
        return np.arange(self.length) > self.length - self.symbols - 1

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        words = 1 + without_repeats(draw, count, KNOWN, self.symbols)
        sizes = on_log_scale(draw, self.fewest or self.symbols, self.symbols, (count, 1))
        at = np.arange(self.symbols)
        given = np.where(at >= self.symbols - sizes, words, 0)
        asked = np.where(at < sizes, np.take_along_axis(words, self.place(at, sizes), 1), 0)
        return np.concatenate([np.zeros_like(sizes), given, np.zeros_like(sizes), asked], 1).astype(np.uint8)

    def place(self, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Where the answer's symbols `at` are in words [N, symbols], of which the last `sizes` [N, 1] count."""
        return (self.symbols - sizes + at).clip(max=self.symbols - 1)


@dataclass(frozen=True)
class Reverse(Repeat):
    name = "reverse"

    def place(self, at: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.broadcast_to(self.symbols - 1 - at, (len(sizes), self.symbols))
