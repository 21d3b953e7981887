"""Which blocks of 128 × 128 pairs the flex backend needs: arithmetic on the range of distances in a block.

m(d) falls with d, so a block has a visible pair if its nearest distance is visible
to its longest span, and only visible pairs if its farthest is visible to its shortest. The lists are device tensors
of O(heads · blocks²) numbers, made without `create_block_mask` and without waiting for the device.

Shapes: B batch, H query heads, Tq and Tk queries and keys, padded to whole blocks, nq and nk of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.blocks import FULL
from spanformer.ops.lower import Lowered

BLOCK = 128
FAR = 1 << 40  # a position that no token has
HIDDEN = FULL - 1  # the mask id of a pattern's block that is not stored


class Lists(NamedTuple):
    """The key blocks of each query block, as `BlockMask.from_kv_blocks` takes them: how many, [1 or B, 1 or H, nq],
    and which, [1 or B, 1 or H, nq, nk], int32."""

    some: tuple[Tensor, Tensor]
    """with visible pairs"""
    full: tuple[Tensor, Tensor] | tuple[None, None]
    """with visible pairs only, and not among the others; (None, None) if these are not told apart"""
    own: Tensor | None = None
    """[1 or B, 1 or H, nq, nk] bool: the blocks of this part of a call, for its mask; None: all"""


def block_lists(call: Lowered, split: bool = False) -> list[Lists]:
    """split: in two parts, blocks whose visible pairs all have m = 1, and those on the ramp of some query. The ramp is
    about as wide as a block, so hardly any of its blocks is full: all of them get the mask."""
    some, full, level = block_cover(call)
    if not split:
        return [Lists(_listed(some & ~full), _listed(full))]
    whole = full & level
    first = Lists(_listed(some & level & ~whole), _listed(whole), level)
    return [first, Lists(_listed(some & ~level), (None, None), ~level)]


def block_cover(call: Lowered) -> tuple[Tensor, Tensor, Tensor]:
    """[1 or B, 1 or H, nq, nk] each: blocks that may have a visible pair, those with visible pairs only, and those
    without a pair on the ramp.
    Exact for a band over consecutive positions; other terms, and positions with gaps, may list a block without visible
    pairs."""
    tk = call.k.shape[2]
    at = _ranges(*call.positions(), -FAR, FAR)
    low, high = at.q_min - at.k_max - call.shift, at.q_max - at.k_min - call.shift  # the distances in a block
    if call.causal:
        near, far, some, full = low.clamp(min=0), high, high >= 0, low >= 0
    else:
        near = torch.where((low <= 0) & (high >= 0), 0, torch.minimum(low.abs(), high.abs()))
        far = torch.maximum(low.abs(), high.abs())
        some = full = torch.ones_like(low, dtype=torch.bool)
    first_key = torch.arange(low.shape[-1], device=low.device) * BLOCK
    first_query = torch.arange(low.shape[-2], device=low.device)[:, None] * BLOCK
    some, full = some & (first_key < tk), full & (first_key + BLOCK <= tk)  # padded keys are not visible
    some = some & (first_query < call.q.shape[2])  # and blocks of padded queries see nothing, at no cost

    level = torch.ones_like(some)
    if call.reach is not None:
        reach = reaches(call)[:, None, None]
        some, full = some & (near < reach), full & (far < reach)
    if call.span is not None:
        shortest, longest = _span_ranges(call)
        left = ramp_left(shortest, far, call.ramp)
        some, full, level = some & (ramp_left(longest, near, call.ramp) > 0), full & (left > 0), left >= call.ramp
    if call.key_bias is not None:
        hidden = is_hidden(call.key_bias.detach())
        hidden = hidden if hidden.shape[1] == 1 else hidden.repeat_interleave(call.heads // hidden.shape[1], 1)
        hidden = _tiles(hidden, True)[:, :, None]
        some, full = some & ~hidden.all(-1), full & ~hidden.any(-1)
    if call.q_documents is not None and call.k_documents is not None:
        limits = torch.iinfo(call.q_documents.dtype)
        of = _ranges(call.q_documents, call.k_documents, limits.min, limits.max)
        some = some & (of.q_min <= of.k_max) & (of.k_min <= of.q_max)
        full = full & (of.q_min == of.q_max) & (of.k_min == of.k_max) & (of.q_min == of.k_min)
    if call.blocks is not None:
        listed, covered = _pattern_cover(call, at)
        some, full = some & listed, full & covered
    return some, some & full, level


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and which: the listed ones first, ascending."""
    order = torch.argsort(mask.to(torch.int32), dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _span_ranges(call: Lowered) -> tuple[Tensor, Tensor]:
    """The shortest and longest span of each query block, [1 or B, H, nq or 1, 1]."""
    assert call.span is not None
    z = call.span.detach().to(working_dtype(call.q))
    if not call.dynamic:
        return z[None, :, None, None], z[None, :, None, None]
    return _tiles(z, math.inf).amin(-1)[..., None], _tiles(z, -math.inf).amax(-1)[..., None]


class _Ranges(NamedTuple):
    """The smallest and largest position or id in every block."""

    q_min: Tensor  # [1 or B, 1, nq, 1]
    q_max: Tensor
    k_min: Tensor  # [1 or B, 1, 1, nk]
    k_max: Tensor


def _ranges(q_ids: Tensor, k_ids: Tensor, least: int, most: int) -> _Ranges:
    """Of ids [1 or B, Tq] and [1 or B, Tk]; `least` and `most` are below and above them all."""
    q_min, q_max, k_min, k_max = (
        extreme for ids in (q_ids, k_ids) for extreme in (_tiles(ids, most).amin(-1), _tiles(ids, least).amax(-1))
    )
    return _Ranges(q_min[:, None, :, None], q_max[:, None, :, None], k_min[:, None, None], k_max[:, None, None])


def _tiles(t: Tensor, fill: float) -> Tensor:
    """[..., T] as [..., n, 128]."""
    return pad(t, -1, fill).unflatten(-1, (-1, BLOCK))


# --- the rule's block pattern -------------------------------------------------------------------------------------


def pattern_grid(call: Lowered) -> Tensor:
    """The pattern's mask ids as a dense grid, [1 or H, rows, columns] int32, HIDDEN where nothing is visible. Both axes
    are longer than the pattern, and keys beyond the last column read the last column."""
    blocks, at = call.blocks, call.q.device
    assert blocks is not None
    offsets, columns, ids = blocks.offsets.to(at), blocks.columns.to(at), blocks.mask_ids.to(at, torch.int32)
    heads, width, (rows, across) = offsets.shape[0], pattern_width(call), grid_shape(call)
    grid = torch.full((heads, rows * across), HIDDEN, dtype=torch.int32, device=at)
    entry = torch.arange(columns.shape[0], device=at)
    for head in range(heads):
        row = torch.searchsorted(offsets[head].contiguous(), entry, right=True) - 1
        inside = (row >= 0) & (row < blocks.rows) & (columns < width)
        cell = torch.where(inside, row * across + columns, width)  # others go to an added column
        grid[head].scatter_(0, cell, ids)
    grid = grid.view(heads, rows, across)
    grid[:, :, width] = HIDDEN
    return grid


def grid_shape(call: Lowered) -> tuple[int, int]:
    """Rows and columns of `pattern_grid`."""
    assert call.blocks is not None
    return bucket(call.blocks.rows), bucket(pattern_width(call) + 1)


def pattern_width(call: Lowered) -> int:
    """The number of block columns in which this call can have a visible key."""
    blocks = call.blocks
    assert blocks is not None
    if call.causal:
        return blocks.rows  # no visible key follows its query
    if call.k_positions is None:
        return max(1, -(-call.k.shape[2] // blocks.size))
    return int(blocks.columns.max()) + 1 if blocks.columns.numel() else 1  # the only read from the device


def _pattern_cover(call: Lowered, at: _Ranges) -> tuple[Tensor, Tensor]:
    """Blocks of 128 that overlap a listed block of the pattern, and those made of its full blocks only,
    [1 or B, 1 or H, nq, nk]: counted over the rectangle of pattern blocks that a block's positions span, by a
    summed-area table."""
    assert call.blocks is not None
    size, grid = call.blocks.size, pattern_grid(call)
    heads, rows, columns = grid.shape
    top, bottom = at.q_min // size, at.q_max // size + 1
    left, right = at.k_min // size, at.k_max // size + 1
    head = torch.arange(heads, device=grid.device)[:, None, None]

    def count(cells: Tensor) -> Tensor:
        area = torch.zeros(heads, rows + 1, columns + 1, dtype=torch.int64, device=grid.device)
        area[:, 1:, 1:] = cells.cumsum(1).cumsum(2)

        def before(row: Tensor, column: Tensor) -> Tensor:
            return area[head, row.clamp(0, rows), column.clamp(0, columns)]

        return before(bottom, right) - before(top, right) - before(bottom, left) + before(top, left)

    return count(grid > HIDDEN) > 0, count(grid == FULL) == (bottom - top) * (right - left)


# --- also read by the mods -------------------------------------------------------------------------------------------


def bucket(n: int) -> int:
    """n rounded up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, …: two per octave. Every size that is compiled in is one
    of these, so a run with varying lengths compiles few kernels. Inside torch.compile, n itself: the caller decides
    there."""
    if torch.compiler.is_compiling():
        return max(n, 1)
    power = 1 << max(0, n - 1).bit_length()
    return power * 3 // 4 if power > 2 and n <= power * 3 // 4 else power


def padded_length(tokens: int) -> int:
    """n rounded up to a bucket of whole blocks, at least one."""
    return BLOCK * bucket(-(-tokens // BLOCK))


def pad(t: Tensor, dim: int, fill: float = 0) -> Tensor:
    """Pad axis `dim` to its `padded_length`."""
    dim %= t.ndim
    missing = padded_length(t.shape[dim]) - t.shape[dim]
    return torch.constant_pad_nd(t, [0, 0] * (t.ndim - 1 - dim) + [0, missing], fill) if missing else t


def working_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def ramp_left(span: Tensor, d: Tensor, ramp: float) -> Tensor:
    """z + R − d: m is this over R, so a distance has weight while it is above 0. Computed here only, so that every use
    rounds the same way."""
    return span + (ramp - d.to(span.dtype))


def is_hidden(key_bias: Tensor) -> Tensor:
    return key_bias == -math.inf


def reaches(call: Lowered) -> Tensor:
    """[H] int32, on the call's device."""
    assert isinstance(call.reach, Tensor)
    reach = call.reach.clamp(max=torch.iinfo(torch.int32).max).to(torch.int32)
    return reach.to(call.q.device, non_blocking=True)
