"""A stream of words in which facts are asked for far back, and rarely.

    gobi ru T7 lana … (many words) … ki gobi T[7] ru …

A fact is a key, a byte from 128 on, and its value, a digit or sign. Its key comes once more, at most `distance` tokens
later and at least half as many, and the value after it is the answer. One in `every` tokens is an answer. All tokens
are to be predicted, as in a text, so a head that finds facts competes with the words for its price.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from spanformer.core.files import replace_file
from spanformer.data.tasks.needle import FACTS, FIRST_FACT, FIRST_KEY, FIRST_VALUE, words

TOKENS = {"train": 4_000_000, "valid": 200_000, "test": 200_000}
"""tokens of each split"""


class Stream(NamedTuple):
    tokens: np.ndarray
    """[T] uint8"""
    answers: np.ndarray
    """[T] bool: which tokens are answers"""


@dataclass(frozen=True)
class Facts:
    name: ClassVar[str] = "facts"
    version: ClassVar[int] = 1
    """part of the names of its files: raise it when its streams change"""

    every: int = 1000
    distance: int = 2000

    def __post_init__(self) -> None:
        if not 8 <= self.distance <= 1 << 16:
            raise ValueError(f"distance of facts is {self.distance}; expected 8 … {1 << 16:,} tokens")
        least = max(8, -(-self.distance // (FACTS // 2)))
        if not least <= self.every <= 1_000_000:
            raise ValueError(
                f"every of facts is {self.every}; expected {least} … 1,000,000 tokens for each answer, as there are "
                f"{FACTS} keys for those that are {self.distance} tokens back"
            )

    def draw(self, draw: np.random.Generator, length: int) -> Stream:
        """A stream of `length` tokens. Facts and questions are at even places, two tokens each."""
        text = words(draw, length)
        answers, half = np.zeros(length, bool), self.distance // 2
        asked = np.sort(2 * draw.integers(0, length // 2 - 1, length // self.every))
        free_from = np.full(FACTS, -1)  # the place from which a key is free again
        taken = np.zeros(length // 2 + 1, bool)
        for question in asked:
            fact = question - 2 * int(draw.integers((half + 1) // 2, half + 1))
            keys = np.flatnonzero(free_from < fact)
            if fact < 0 or taken[fact // 2] or taken[question // 2] or not len(keys):
                continue
            key = int(draw.choice(keys))
            pair = FIRST_FACT + key, int(draw.integers(FIRST_VALUE, FIRST_KEY))
            text[fact : fact + 2] = text[question : question + 2] = pair
            taken[[fact // 2, question // 2]] = True
            free_from[key] = question
            answers[question + 1] = True
        return Stream(text, answers)

    def write(self, folder: Path) -> dict[str, Path]:
        """One file of a stream per split, written if missing. No two splits have the same seed."""
        paths = {split: folder / f"{self.name}-{self.every}-{self.distance}-{self.version}.{split}" for split in TOKENS}
        for seed, (split, count) in enumerate(TOKENS.items()):
            if not paths[split].exists():
                with replace_file(paths[split]) as new:
                    new.write_bytes(self.draw(np.random.default_rng(seed), count).tokens.tobytes())
        return paths
