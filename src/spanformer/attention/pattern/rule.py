"""Patterns as rules: reaches and strides where distances suffice, else blocks.

Shapes: N blocks that may have a visible pair, S positions in a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spanformer.attention.pattern.base import Bands, Pattern, Where
from spanformer.ops import BlockIndex, Rule, Union
from spanformer.ops.blocks import FULL, HIDDEN
from spanformer.ops.rule import UNLIMITED

AT_ONCE = 1 << 22  # pairs evaluated at a time
MOST_SIZE = 2048  # its square is AT_ONCE


@functools.lru_cache(maxsize=64)
def make_rule(
    patterns: tuple[Pattern, ...],
    length: int,
    start: int,
    causal: bool,
    size: int,
    device: str = "cpu",
    queries: int | None = None,
) -> Rule | Union:
    """The rule of a layer whose heads see these patterns, over `length` keys from position `start` on, for the last
    `queries` of them. Heads whose patterns depend only on distances run by bands, the others by blocks; both kinds
    together are a Union. Cached, because a layer asks at every step."""
    heads = len(patterns)
    bands = [disjoint(p.bands(causal)) for p in patterns]
    by_distance = _distances(bands, causal)
    if None not in bands:
        return by_distance
    nothing, by_pattern = _empty(length, size), {}
    for p, found in zip(patterns, bands, strict=True):
        by_pattern[p] = nothing if found is not None else build_blocks(p, length, size, start, causal, queries)
    each = [by_pattern[p] for p in patterns]
    blocks = each[0] if all(x is each[0] for x in each) else BlockIndex.stack(each)
    blocks = blocks.to(device)
    reach = [0 if found is not None else _far(p, causal) for p, found in zip(patterns, bands, strict=True)]
    if not any(found for found in bands):
        return Rule(heads, causal=causal, reach=_reach(reach), blocks=blocks)
    return Union(Rule(heads, causal=causal, reach=reach, blocks=blocks), by_distance)


def _far(pattern: Pattern, causal: bool) -> int:
    """How many distances blocks may show. For a causal pattern, its layer gets this from `context_length`."""
    return UNLIMITED if causal else min(max(pattern.context_length(), pattern.lookahead()) + 1, UNLIMITED)


def _distances(bands: Sequence[Bands | None], causal: bool) -> Rule | Union:
    """A rule for all heads' first bands, one for the second …; a head without a further band sees nothing there."""
    rules = []
    for some in itertools.zip_longest(*(b or () for b in bands), fillvalue=(1, 0, 0)):
        strides, least, limits = zip(*some, strict=True)
        rules.append(Rule(len(bands), causal=causal, stride=strides, skip=least, reach=_reach(limits)))
    if not rules:
        return Rule(len(bands), causal=causal, reach=0)
    return rules[0] if len(rules) == 1 else Union(*rules)


def _reach(limits: Sequence[int]) -> list[int] | None:
    return None if all(limit >= UNLIMITED for limit in limits) else list(limits)


def intersect(bands: Sequence[Bands]) -> Bands:
    """The distances that are in both bands."""
    return [
        # beyond UNLIMITED a stride leaves only distance 0, and int64 may not hold it
        (min(math.lcm(*(s for s, _, _ in some)), UNLIMITED), max(a for _, a, _ in some), min(b for _, _, b in some))
        for some in itertools.product(*bands)
    ]


def disjoint(bands: Bands | None) -> Bands | None:
    """The same distances in disjoint bands; None where such bands do not exist."""
    if bands is None:
        return None
    done: Bands = []
    for stride, least, limit in sorted(set(bands), key=lambda band: (band[0], band[1], -band[2])):
        for other, at, to in done:
            shared = math.lcm(stride, other)
            if stride % other == 0 and at <= least:  # distances up to `to` are covered already
                least = max(least, to)
            elif -(-max(least, at) // shared) * shared < min(limit, to):
                return None
        first = -(-least // stride) * stride
        if first < limit:
            done.append((stride, least, limit))
    return done


def _empty(length: int, size: int) -> BlockIndex:
    rows, none = max(1, -(-length // size)), torch.zeros(0, dtype=torch.int64)
    return BlockIndex(
        size, torch.zeros(1, rows + 1, dtype=torch.int64), none, none, torch.zeros(0, size, size, dtype=torch.bool)
    )


@functools.lru_cache(maxsize=64)
def build_blocks(
    pattern: Pattern, length: int, size: int, start: int, causal: bool, queries: int | None = None
) -> BlockIndex:
    """Evaluate only blocks with possibly visible pairs, and only the rows of the last `queries`."""
    check_size(size)
    if length < 0:
        raise ValueError(f"length is {length}; expected at least 0")
    where = Where(causal, start, start + length, start + length)
    side = max(1, -(-length // size))
    above = 0 if queries is None else max(0, length - queries) // size
    lo = start + size * torch.arange(above, side)
    areas = pattern.areas(lo, (lo + size).clamp(max=where.stop), where) if length else []
    cells = [_cells(*area, lo, size, side, where) + above * side for area in areas]
    cell = torch.cat(cells).unique() if cells else torch.zeros(0, dtype=torch.int64)
    ids, known, masks = torch.full_like(cell, HIDDEN), {}, []
    for at in torch.arange(cell.numel()).split(max(1, AT_ONCE // size**2)):
        kinds, kind, tiles = _look(pattern, where, size, cell[at] // side, cell[at] % side)
        for n, (number, tile) in enumerate(zip(kinds, tiles, strict=True)):
            if number not in known:
                whole = bool(tile.all())
                known[number] = FULL if whole else HIDDEN if not bool(tile.any()) else len(masks)
                masks += [tile] if known[number] >= 0 else []
            ids[at[kind == n]] = known[number]
    seen = ids != HIDDEN
    stacked = torch.stack(masks) if masks else torch.zeros(0, size, size, dtype=torch.bool)
    return BlockIndex.from_blocks(size, side, cell[seen] // side, cell[seen] % side, ids[seen], stacked)


def check_size(size: int) -> None:
    """Positions in a block: its mask has size² of them."""
    if not 1 <= size <= MOST_SIZE:
        raise ValueError(f"size is {size}; expected 1 … {MOST_SIZE:,} positions in a block")


def _cells(row: Tensor, first: Tensor, end: Tensor, lo: Tensor, size: int, side: int, where: Where) -> Tensor:
    """row · side + column of every block that the ranges of keys touch."""
    if where.causal:
        end = torch.minimum(end, lo[row] + size)
    a = (first.clamp(min=where.start) - where.start) // size
    b = -((where.start - end.clamp(max=where.stop)) // size)
    counts = (b - a).clamp(min=0)
    line = torch.repeat_interleave(torch.arange(row.numel()), counts)
    column = torch.arange(line.numel()) + (a - counts.cumsum(0) + counts)[line]
    return row[line] * side + column


def _look(pattern: Pattern, where: Where, size: int, row: Tensor, column: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """The distinct masks of these blocks [M, S, S], an id for each, and each block's id [N]. Beyond
    the end no pair exists, so a block counts as full if the part inside is full."""
    at = torch.arange(size)
    i = (where.start + row[:, None] * size + at)[:, :, None]
    j = (where.start + column[:, None] * size + at)[:, None]
    seen = pattern.sees(i, j, where)
    seen = (seen & (j <= i) if where.causal else seen).expand(row.numel(), size, size)
    inside = (i < where.stop) & (j < where.stop)
    full = (seen | ~inside).flatten(1).all(1)
    tiles = (full[:, None, None] | (seen & inside)).flatten(1)
    weights, partly = _weights(size), tiles.any(1) & ~full
    numbers = torch.where(full, weights.sum(), 0)
    numbers[partly] = torch.where(tiles[partly], weights, 0).sum(1)
    kinds, kind = numbers.unique(return_inverse=True)
    first = torch.full(kinds.shape, len(tiles)).scatter_reduce(0, kind, torch.arange(len(tiles)), "amin")
    assert torch.equal(tiles[first][kind], tiles), "two masks have one number"
    return kinds.tolist(), kind, tiles[first].view(-1, size, size)


@functools.lru_cache(maxsize=4)
def _weights(size: int) -> Tensor:
    """[S · S] random weights, so large that equal sums mean equal masks."""
    return torch.randint(-(1 << 62), 1 << 62, (size * size,), generator=torch.Generator().manual_seed(0))
