"""Multi-query associative recall: Zoology (Arora et al., 2023). https://arxiv.org/abs/2312.04927

    filler … k₁ v₁ k₂ v₂ … kₙ vₙ … filler … k₂ [v₂] kₙ [vₙ] … k₁ [v₁]

The keys come again in another order, and their values are the answers, in brackets. The pairs begin `distance` tokens
before the questions, so a key is that far from its question on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import DistanceTask, put, without_repeats

KEYS, VALUES = 32, 32
FIRST_VALUE, FIRST_FILLER, END = KEYS, KEYS + VALUES, 128


@dataclass(frozen=True)
class Recall(DistanceTask):
    name = "recall"

    pairs: int = 8

    def __post_init__(self) -> None:
        self.require(1 <= self.pairs <= KEYS, "pairs", f"1 … {KEYS}, as there are {KEYS} keys")
        self.check_distances(2 * self.pairs)

    @property
    def length(self) -> int:
        return self.distance + 2 * self.pairs

    def answers(self) -> np.ndarray:
        at = np.arange(self.length) - self.distance
        return (at > 0) & (at % 2 == 1)

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        texts = draw.integers(FIRST_FILLER, END, (count, self.length), np.uint8)
        keys = without_repeats(draw, count, KEYS, self.pairs)
        pairs = np.stack([keys, draw.integers(FIRST_VALUE, FIRST_FILLER, keys.shape)], -1)
        asked = np.take_along_axis(pairs, without_repeats(draw, count, self.pairs, self.pairs)[..., None], 1)
        put(texts, self.distance - self.distances(draw, count), pairs.reshape(count, -1))
        texts[:, self.distance :] = asked.reshape(count, -1)
        return texts
