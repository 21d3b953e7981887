"""Patterns of whole blocks: random ones, or a permutation.

Shapes: r [N] block rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.attention.pattern.base import Areas, Pattern, Where, at_least
from spanformer.ops.dropout import mix
from spanformer.ops.rule import UNLIMITED

MOST_DRAWN = 1024  # blocks per row: each draw is compared with the earlier ones


@dataclass(frozen=True)
class Random(Pattern):
    """Queries in block r of `size` tokens see `count` key blocks drawn for r, all different, none closer than `near`
    blocks and none of the `first`.

    A causal draw is from the blocks before r, by a hash of (seed, r): what a token sees does not change as the text
    grows, so streaming and training agree. A draw in both directions is from the blocks of the whole text, so it
    depends on the text's length."""

    count: int
    seed: int = 0
    size: int = 64
    near: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        at_least("count", self.count, 0, MOST_DRAWN)
        at_least("size", self.size, 1)
        for name in ("seed", "near", "first"):
            at_least(name, getattr(self, name), 0)

    def _draw(self, r: Tensor, where: Where) -> list[Tensor]:
        """The key blocks of block rows r, one draw after the other; −1 where there are too few to draw from.
        Floyd's algorithm draws without repetition: the range of the n-th draw is one larger than that of the draw
        before."""
        low = torch.clamp(r - self.near, min=self.first)  # near blocks are excluded, if they exist
        if where.causal:
            pool, gap = low - self.first, torch.zeros_like(r)
        else:
            if where.length is None:
                raise ValueError(f"{self} samples blocks of the whole text in both directions; pass its length")
            n = -(-where.length // self.size)
            gap = torch.clamp(torch.clamp(r + self.near + 1, max=n) - low, min=0)
            pool = torch.clamp(n - self.first - gap, min=0)
        drawn = r.new_full((self.count, *r.shape), -1)
        for k in range(self.count):
            top = pool - self.count + k
            hashed = mix(mix(mix(torch.full_like(r, self.seed & 0xFFFFFFFF)) ^ (r & 0xFFFFFFFF)) ^ k)
            t = hashed % torch.clamp(top + 1, min=1)
            t = torch.where((drawn[:k] == t).any(0), top, t)  # no earlier draw can be `top`
            drawn[k] = torch.where(top >= 0, t, torch.where(pool > k, k, -1))
        columns = [torch.where(t >= 0, t + self.first, -1) for t in drawn]
        columns = [torch.where((c >= low) & (c >= 0), c + gap, c) for c in columns]
        return [torch.where(r >= 0, c, -1) for c in columns]

    def sees(self, i, j, where):
        column, seen = torch.where(j >= 0, j // self.size, -2), (i != i) & (j != j)
        for drawn in self._draw(i // self.size, where):
            seen = seen | (column == drawn)
        return seen

    def areas(self, lo, hi, where):
        areas: Areas = []
        first, last = lo // self.size, (hi - 1) // self.size
        for step in range(int((last - first).max()) + 1 if lo.numel() else 0):  # block rows that a range touches
            row = (first + step <= last).nonzero()[:, 0]
            for drawn in self._draw((first + step)[row], where):
                found = drawn >= 0
                areas.append((row[found], drawn[found] * self.size, (drawn[found] + 1) * self.size))
        return areas


@dataclass(frozen=True)
class Blockwise(Pattern):
    """Queries of block b see only the keys of block π(b). A text is cut into as many blocks as the permutation has
    entries, or, with `size`, into blocks of this many tokens, to which the permutation applies periodically."""

    permutation: tuple[int, ...]
    size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.permutation, Sequence) or not self.permutation:
            raise ValueError(f"permutation is {self.permutation!r}; expected a list of blocks, such as [1, 0]")
        object.__setattr__(self, "permutation", tuple(self.permutation))
        if sorted(self.permutation) != list(range(len(self.permutation))):
            raise ValueError(
                f"permutation is {list(self.permutation)}; expected each of 0 … {len(self.permutation) - 1} once"
            )
        if self.size is not None:
            at_least("size", self.size, 1)

    def _size(self, where: Where) -> int:
        if self.size is None and where.length is None:
            raise ValueError(
                f"{self} cuts the whole text into blocks; pass the text's length, or give the blocks a size"
            )
        return self.size or max(1, -(-(where.length or 0) // len(self.permutation)))

    def _target(self, block: Tensor) -> Tensor:
        n = len(self.permutation)
        return torch.tensor(self.permutation)[block % n] + block // n * n

    def sees(self, i, j, where):
        size = self._size(where)
        return self._target(i // size) == j // size

    def areas(self, lo, hi, where):
        size, areas = self._size(where), []
        first, last = lo // size, (hi - 1) // size
        for step in range(int((last - first).max()) + 1 if lo.numel() else 0):
            row = (first + step <= last).nonzero()[:, 0]
            target = self._target((first + step)[row])
            areas.append((row, target * size, (target + 1) * size))
        return areas

    def context_length(self):
        if self.size is None:
            return UNLIMITED
        far = max(abs(to - block) for block, to in enumerate(self.permutation))  # the farthest block, either way
        return (far + 1) * self.size - 1

    def lookahead(self):
        return self.context_length()
