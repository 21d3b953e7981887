"""Facts in a long text, asked for at its end.

    gobi ru T7 lana … lana ki gobi … K4 … ru bano … K[4] T[7]

A fact is a key and its value, a digit or sign. Keys are capital letters, or with more than 26 of them bytes from 128 on
as in the stream `facts`. Facts are at random places among random words, at most `distance` tokens before the questions
and at least half as many. Their keys come again at the end in another order; the values are the answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spanformer.data.tasks.base import DistanceTask, put, without_repeats

FIRST_VALUE, FIRST_KEY, LETTERS = 33, 65, 26
FIRST_FACT, FACTS = 128, 96
WORDS, LONGEST = 256, 7
"""words of the language, and the letters of the longest"""


@dataclass(frozen=True)
class Needle(DistanceTask):
    name = "needle"

    facts: int = 4
    keys: int = LETTERS

    def __post_init__(self) -> None:
        self.require(1 <= self.keys <= FACTS, "keys", f"1 … {FACTS}")
        self.require(1 <= self.facts <= self.keys, "facts", f"1 … {self.keys}, as there are {self.keys} keys")
        self.check_distances(4 * self.facts)

    @property
    def length(self) -> int:
        return self.distance + 2 * self.facts

    def answers(self) -> np.ndarray:
        at = np.arange(self.length) - self.distance
        return (at > 0) & (at % 2 == 1)

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        texts = np.stack([words(draw, self.length) for _ in range(count)])
        first = FIRST_KEY if self.keys <= LETTERS else FIRST_FACT
        keys = first + without_repeats(draw, count, self.keys, self.facts)
        facts = np.stack([keys, draw.integers(FIRST_VALUE, FIRST_KEY, keys.shape)], -1)
        distances = self.distances(draw, count)
        order = draw.random((count, self.distance // 4))  # every second place of the first half
        places = np.where(np.arange(self.distance // 4) < distances[:, None] // 4, order, 1).argsort(1)
        for n in range(self.facts):
            put(texts, self.distance - distances + 2 * places[:, n], facts[:, n])
        asked = np.take_along_axis(facts, without_repeats(draw, count, self.facts, self.facts)[..., None], 1)
        texts[:, self.distance :] = asked.reshape(count, -1)
        return texts


def words(draw: np.random.Generator, length: int) -> np.ndarray:
    """[length] random words with spaces between them."""
    lexicon = np.random.default_rng(0)  # the same language in every split
    letters = lexicon.integers(ord("a"), ord("z") + 1, (WORDS, LONGEST + 1), np.uint8)
    ends = lexicon.integers(2, LONGEST + 1, WORDS)
    letters[np.arange(WORDS), ends] = ord(" ")
    chosen = draw.integers(0, WORDS, length // 3 + 1)  # the shortest word has two letters and a space
    shown = np.arange(LONGEST + 1) <= ends[chosen][:, None]
    return letters[chosen][shown][:length]
