"""Summary statistics of attention maps: for one text, how far heads look; for two texts, how much the attention to one
changes from token to token of the other.

Shapes: H heads, Tq queries, Tk keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class HeadStats:
    """Statistics of a model's heads over one text, or of one half of an encoder–decoder."""

    maps: Sequence[np.ndarray]
    """[layers] of [H, Tq, Tk]"""
    queries: Sequence[str]
    """[Tq] tokens as they are shown"""
    keys: Sequence[str]
    """[Tk]"""
    part: str = ""
    """of an encoder–decoder: encoder, decoder or cross-attention"""
    above: int = 0
    """number of global tokens at the front, which have no distance to the text"""

    axes: ClassVar[tuple[str, str]] = ("query: token that looks", "key: token looked at")
    rows: ClassVar[str] = "a row is a query, a column a key"

    def title(self, name: str) -> str:
        """name: the model's"""
        whose = f"{name}'s {self.part}" if self.part else name
        return f"Where each head of {whose} looks"

    def measure(self, weights: np.ndarray) -> float:
        """The mean distance, weighted by attention [Tq, Tk], that a head looks at, in tokens."""
        weights = weights[self.above :, self.above :]
        at = np.arange(len(weights))
        total = weights.sum()
        return float((weights * np.abs(at[:, None] - at)).sum() / total) if total > 0 else 0.0

    def of_one(self, layer: int, head: int) -> str:
        """One head, counted from 1, in a sentence."""
        return f"On average it looks {self.measure(self.maps[layer - 1][head - 1]):.1f} tokens {self._away()}."

    def of_all(self) -> str:
        (least, near), (most, far) = self._ends()
        return (
            f"Weighted by attention, {_named(far)} looks farthest, {most:.1f} tokens {self._away()} on average, and "
            f"{_named(near)} nearest, {least:.1f}."
        )

    def chosen(self, layer: int = 0, head: int = 0) -> tuple[int, int]:
        """The (layer, head), counted from 1, of the greatest measure; within one layer or head number if it is not
        0."""
        found = self._measures()
        fitting = [place for place in found if layer in (0, place[0]) and head in (0, place[1])]
        return max(fitting, key=found.__getitem__)

    def _away(self) -> str:
        return "away" if any(np.triu(layer, 1).any() for layer in self.maps) else "back"

    def _measures(self) -> dict[tuple[int, int], float]:
        return {
            (layer, head): self.measure(weights)
            for layer, found in enumerate(self.maps, 1)
            for head, weights in enumerate(found, 1)
        }

    def _ends(self) -> list[tuple[float, tuple[int, int]]]:
        """The least measure and the greatest, each with its place."""
        found = [(measure, place) for place, measure in self._measures().items()]
        return [min(found), max(found)]


class CrossHeadStats(HeadStats):
    """Statistics of cross-attention from target to source. Two texts have no distance between them; the measure is how
    much a head's attention moves from one target token to the next."""

    axes = ("target: written token", "source: token looked at")
    rows = "a row is a token as it is written, a column one of the source"

    def measure(self, weights: np.ndarray) -> float:
        """The share of the weights [Tq, Tk] that differs from the head's mean attention."""
        return float(np.abs(weights - weights.mean(0)).sum(1).mean() / 2)

    def title(self, name: str) -> str:
        return f"Where each head of {name} looks in the source as it writes"

    def of_one(self, layer: int, head: int) -> str:
        share = self.measure(self.maps[layer - 1][head - 1])
        return f"{100 * share:.0f} % of its attention is not where it is on average."

    def of_all(self) -> str:
        (least, still), (most, moved) = self._ends()
        return (
            f"From token to token {_named(moved)} moves most over the source, {100 * most:.0f} % of its attention not "
            f"being where it is on average, and {_named(still)} least, {100 * least:.0f} %."
        )


def _named(place: tuple[int, int]) -> str:
    return f"head {place[1]} of layer {place[0]}"
