"""Patterns that depend on absolute positions: blocks, their last tokens, global tokens, blocks of an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.attention.pattern.base import Either, Pattern, at_least, every_row


@dataclass(frozen=True)
class Block(Pattern):
    """The key is in the query's block of `size` tokens, or up to `before` tokens before that block or `after` after
    it."""

    size: int
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        at_least("size", self.size, 1)
        at_least("before", self.before, 0)
        at_least("after", self.after, 0)

    def sees(self, i, j, where):
        first = i // self.size * self.size
        return (j >= first - self.before) & (j < first + self.size + self.after)

    def areas(self, lo, hi, where):
        first, last = lo // self.size * self.size, (hi - 1) // self.size * self.size
        return [(every_row(lo), first - self.before, last + self.size + self.after)]

    def context_length(self):
        return self.size - 1 + self.before

    def lookahead(self):
        return self.size - 1 + self.after


@dataclass(frozen=True)
class Summary(Pattern):
    """The last c keys of every block of l: the second half of the Sparse Transformer's fixed attention."""

    size: int
    last: int

    def __post_init__(self) -> None:
        at_least("size", self.size, 1)
        at_least("last", self.last, 1)
        if self.last > self.size:
            raise ValueError(f"last is {self.last}; expected at most the block's size, {self.size}")

    def sees(self, i, j, where):
        return (j % self.size >= self.size - self.last) & (i == i)

    def areas(self, lo, hi, where):
        block = torch.arange(where.start // self.size, -(-where.stop // self.size))
        row, end = torch.meshgrid(every_row(lo), (block + 1) * self.size, indexing="ij")
        return [(row.flatten(), end.flatten() - self.last, end.flatten())]


@dataclass(frozen=True)
class Fixed(Pattern):
    """The key is in the query's block of l, or among the last c keys of any block (Sparse Transformer)."""

    size: int
    last: int

    def __post_init__(self) -> None:
        Summary(self.size, self.last)

    def factors(self) -> tuple[Pattern, Pattern]:
        return Block(self.size), Summary(self.size, self.last)

    def sees(self, i, j, where):
        return Either(self.factors()).sees(i, j, where)

    def areas(self, lo, hi, where):
        return Either(self.factors()).areas(lo, hi, where)


@dataclass(frozen=True)
class Global(Pattern):
    """Every token sees the global tokens, and (with `rows`) they see every token. Global(n): the first n; Global([0,
    9])."""

    tokens: tuple[int, ...] | int
    rows: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.tokens, int):
            return at_least("tokens", self.tokens, 0)
        if not isinstance(self.tokens, Sequence):
            raise ValueError(f"tokens is {self.tokens!r}; expected a number of first tokens, or a list of positions")
        for token in self.tokens:
            at_least("tokens", token, 0)
        object.__setattr__(self, "tokens", tuple(sorted(set(self.tokens))))

    def _runs(self) -> list[tuple[int, int]]:
        """Runs of neighbouring positions, [first, after the last)."""
        if isinstance(self.tokens, int):
            return [(0, self.tokens)] if self.tokens else []
        runs: list[tuple[int, int]] = []
        for token in self.tokens:
            runs = (
                [*runs[:-1], (runs[-1][0], token + 1)] if runs and runs[-1][1] == token else [*runs, (token, token + 1)]
            )
        return runs

    def sees(self, i, j, where):
        seen = (i != i) & (j != j)
        for first, end in self._runs():
            seen = seen | ((j >= first) & (j < end))
            if self.rows:
                seen = seen | ((i >= first) & (i < end))
        return seen

    def areas(self, lo, hi, where):
        areas = []
        for first, end in self._runs():
            areas.append((every_row(lo), torch.full_like(lo, first), torch.full_like(lo, end)))
            own = ((lo < end) & (hi > first)).nonzero()[:, 0]
            if self.rows and own.numel():
                areas.append((own, torch.full_like(own, where.start), torch.full_like(own, where.stop)))
        return areas


@dataclass(frozen=True)
class Grid(Pattern):
    """An image of `width` pixels per line, generated in blocks of `high` × `wide` pixels: a pixel sees its block, the
    `above` lines over it, and `beside` columns on either side of both (Image Transformer, 2-D). Tokens come block by
    block in raster order, and pixel by pixel in raster order within a block."""

    width: int
    high: int
    wide: int
    above: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        for name, least in (("high", 1), ("wide", 1), ("width", 1), ("above", 0), ("beside", 0)):
            at_least(name, getattr(self, name), least)
        if self.width % self.wide:
            raise ValueError(f"width is {self.width}; expected a multiple of the blocks' {self.wide} columns")

    def _place(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(line and column of the token's block, of its pixel)."""
        area, across = self.high * self.wide, self.width // self.wide
        block, pixel = t // area, t % area
        top, left = block // across * self.high, block % across * self.wide
        return top, left, top + pixel // self.wide, left + pixel % self.wide

    def sees(self, i, j, where):
        top, left, _, _ = self._place(i)
        _, _, y, x = self._place(j)
        across = (x >= left - self.beside) & (x < left + self.wide + self.beside)
        return across & (y >= top - self.above) & (y < top + self.high)

    def areas(self, lo, hi, where):
        area, across, areas = self.high * self.wide, self.width // self.wide, []
        first, last = lo // area, (hi - 1) // area
        up, side = -(-self.above // self.high), -(-self.beside // self.wide)
        blocks = int(last.max()) + 1 if lo.numel() else 0  # there is no key beyond them
        up, side = min(up, blocks // across), min(side, across - 1, blocks)
        for step in range(int((last - first).max()) + 1 if lo.numel() else 0):
            row = (first + step <= last).nonzero()[:, 0]
            block = (first + step)[row]
            for dy in range(up + 1):
                for dx in range(-side, side + 1):
                    there = (block % across + dx >= 0) & (block % across + dx < across)
                    key = (block - dy * across + dx)[there]
                    areas.append((row[there], key * area, (key + 1) * area))
        return areas

    def context_length(self):
        up, side = -(-self.above // self.high), -(-self.beside // self.wide)
        return (up * (self.width // self.wide) + side + 1) * self.high * self.wide - 1

    def lookahead(self):
        return (-(-self.beside // self.wide) + 1) * self.high * self.wide - 1
