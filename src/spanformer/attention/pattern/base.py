"""Patterns: which pairs of positions are visible, as plain data that composes like sets.

Each pattern has an equation, `sees`, over a query's position i and a key's j, and `areas`, which lists ranges of keys
that contain all that a range of queries sees, so that no length × length tensor is built. A causal pattern keeps the
pairs with j ≤ i; only a random draw and a permutation of the whole text depend on more than the pair (see `Where`).
Shapes: i and j are integer tensors that broadcast; R ranges of queries.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.ops import BlockIndex, Rule, Union
from spanformer.ops.rule import UNLIMITED

Areas = list[tuple[Tensor, Tensor, Tensor]]
"""any number of (index of the range of queries [N], first key [N], key after the last [N])"""
MOST = 1 << 31  # limit of any number, so that int64 holds the product of two
MOST_BANDS = 4096
Bands = list[tuple[int, int, int]]
"""(stride, least, limit): the distances d ≥ least that are multiples of the stride and below the limit"""


@dataclass(frozen=True)
class Where:
    """Positions start … stop − 1 of a text of `length` tokens (default: stop)."""

    causal: bool = True
    start: int = 0
    stop: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Pattern:
    """A set of pairs. `a | b` is either, `a & b` both."""

    def sees(self, i: Tensor, j: Tensor, where: Where) -> Tensor:
        """The equation, without causality."""
        raise NotImplementedError(f"{type(self).__name__} has no equation; override sees")

    def areas(self, lo: Tensor, hi: Tensor, where: Where) -> Areas:
        """Ranges of keys that the queries lo … hi − 1 ([R] each) can see; they may be too large, never too small."""
        raise NotImplementedError(f"{type(self).__name__} has no areas; override areas")

    def bands(self, causal: bool) -> Bands | None:
        """The pattern as bands of distances, |d| if not causal; None if it depends on more."""
        return None

    def context_length(self) -> int:
        """The most tokens back that it sees."""
        return UNLIMITED

    def lookahead(self) -> int:
        """The most future tokens that it sees, if it is not causal."""
        return UNLIMITED

    def visible(self, i: Tensor, j: Tensor, *, causal: bool = True, length: int | None = None) -> Tensor:
        """Whether the query at position i sees the key at j. length: of the text, for patterns that need it."""
        seen = self.sees(i, j, Where(causal, length=length))
        return seen & (j <= i) if causal else seen & torch.ones_like(i + j, dtype=torch.bool)

    def blocks(self, length: int, size: int = 64, *, start: int = 0, causal: bool = True) -> BlockIndex:
        """The pattern as blocks over `length` positions from `start` on."""
        from spanformer.attention.pattern.rule import build_blocks

        return build_blocks(self, length, size, start, causal)

    def pairs(self, length: int, *, causal: bool = True) -> int:
        """The number of visible pairs in a text of this length, counted by blocks."""
        index = self.blocks(length, causal=causal)
        rows = torch.arange(index.rows).repeat_interleave(index.offsets[0].diff())
        sides = ((length - at * index.size).clamp(max=index.size) for at in (rows, index.columns))
        partly = index.masks.flatten(1).sum(1)
        whole = torch.mul(*sides)
        return int(torch.where(index.mask_ids < 0, whole, partly[index.mask_ids] if len(partly) else 0).sum())

    def rule(self, heads: int, length: int, *, start: int = 0, causal: bool = True, size: int = 64) -> Rule | Union:
        """The pattern as the cheapest rule for `length` keys from position `start` on: reaches and strides if they
        suffice, else blocks."""
        from spanformer.attention.pattern.rule import make_rule

        return make_rule((self,) * heads, length, start, causal, size)

    def __or__(self, other: Pattern) -> Pattern:
        return Either((*_parts(self, Either), *_parts(other, Either)))

    def __and__(self, other: Pattern) -> Pattern:
        return Both((*_parts(self, Both), *_parts(other, Both)))

    def __str__(self) -> str:
        """The expression that `parse` reads."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            text = str(list(value) if isinstance(value, tuple) else value)
            if field.default is dataclasses.MISSING:
                shown.append(text)
            elif value != field.default:
                shown.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"


def _parts(pattern: Pattern, kind: type[Either] | type[Both]) -> tuple[Pattern, ...]:
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


@dataclass(frozen=True)
class Either(Pattern):
    parts: tuple[Pattern, ...]

    def sees(self, i, j, where):
        seen = self.parts[0].sees(i, j, where)
        for part in self.parts[1:]:
            seen = seen | part.sees(i, j, where)
        return seen

    def areas(self, lo, hi, where):
        return [area for part in self.parts for area in part.areas(lo, hi, where)]

    def bands(self, causal):
        found = [part.bands(causal) for part in self.parts]
        return None if None in found else [band for bands in found for band in bands or ()]

    def context_length(self):
        return max(part.context_length() for part in self.parts)

    def lookahead(self):
        return max(part.lookahead() for part in self.parts)

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True)
class Both(Pattern):
    parts: tuple[Pattern, ...]

    def sees(self, i, j, where):
        seen = self.parts[0].sees(i, j, where)
        for part in self.parts[1:]:
            seen = seen & part.sees(i, j, where)
        return seen

    def areas(self, lo, hi, where):
        """The areas of the part with the fewest keys."""
        return min((part.areas(lo, hi, where) for part in self.parts), key=_extent)

    def bands(self, causal):
        from spanformer.attention.pattern.rule import intersect

        found = [bands for part in self.parts if (bands := part.bands(causal)) is not None]
        # Many unions have too many intersections to list; those run by blocks.
        listed = len(found) == len(self.parts) and math.prod(map(len, found)) <= MOST_BANDS
        return intersect(found) if listed else None

    def context_length(self):
        return min(part.context_length() for part in self.parts)

    def lookahead(self):
        return min(part.lookahead() for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({p})" if isinstance(p, Either) else str(p) for p in self.parts)


def _extent(areas: Areas) -> int:
    return sum(int((to - at).clamp(min=0).sum()) for _, at, to in areas)


def every_row(lo: Tensor) -> Tensor:
    return torch.arange(lo.numel())


def at_least(name: str, value: int, least: int, most: int = MOST) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} to {most:,}")
