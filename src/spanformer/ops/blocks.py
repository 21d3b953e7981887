"""Block-sparse patterns over positions, stored as indices instead of an L × L mask.

Shapes: Hb is 1 (all heads share one pattern) or H; N is the number of stored blocks, M the number of element masks,
S the block size. Block row r holds the query positions r·S … r·S + S − 1, column c the key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FULL = -1  # the mask id of a block whose every pair is visible
HIDDEN = FULL - 1  # the mask id of a block that is not stored


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Which blocks of (query position, key position) pairs are visible.

    size: S, positions per block. offsets [Hb, rows + 1] int64: where each block row starts in `columns`.
    columns [N] int64: visible key blocks, ascending within a row.
    mask_ids [N] int64: −1 for a fully covered block, else a row of `masks`.
    masks [M, S, S] bool: element masks (query, key) of partly covered blocks only.
    """

    size: int
    offsets: Tensor
    columns: Tensor
    mask_ids: Tensor
    masks: Tensor

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"blocks.size is {self.size}; expected at least 1")
        for name in ("offsets", "columns", "mask_ids"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.int64:
                raise ValueError(f"blocks.{name} has dtype {tensor.dtype}; expected torch.int64")
        for name in ("columns", "mask_ids", "masks"):
            at = getattr(self, name).device
            if at != self.offsets.device:
                raise ValueError(f"blocks.{name} is on {at}; expected {self.offsets.device}, where offsets is")
        if self.offsets.ndim != 2 or self.offsets.shape[0] < 1 or self.offsets.shape[1] < 2:
            raise ValueError(f"blocks.offsets has shape {list(self.offsets.shape)}; expected [1 or H, rows + 1]")
        if self.columns.shape != self.mask_ids.shape or self.columns.ndim != 1:
            raise ValueError(
                f"blocks.mask_ids has shape {list(self.mask_ids.shape)}; "
                f"expected {list(self.columns.shape)}, as columns has"
            )
        if self.masks.dtype != torch.bool or self.masks.shape[1:] != (self.size, self.size):
            raise ValueError(
                f"blocks.masks has shape {list(self.masks.shape)} and dtype {self.masks.dtype}; "
                f"expected [M, {self.size}, {self.size}] of torch.bool"
            )
        if not torch.compiler.is_compiling() and self.offsets.device.type == "cpu":
            self._check_values()

    def _check_values(self) -> None:
        starts, ends = self.offsets[:, :-1], self.offsets[:, 1:]
        n = self.columns.numel()
        if bool((starts > ends).any()) or int(self.offsets.min()) < 0 or int(self.offsets.max()) > n:
            raise ValueError(f"blocks.offsets must ascend within 0 … {n}, the number of columns")
        if n and (int(self.columns.min()) < 0):
            raise ValueError("blocks.columns must not be negative")
        if n and not -1 <= int(self.mask_ids.min()) <= int(self.mask_ids.max()) < max(self.masks.shape[0], 0):
            raise ValueError(f"blocks.mask_ids must lie in −1 … {self.masks.shape[0] - 1}")
        row_of, at = _spread((ends - starts).flatten(), starts.flatten())
        flat = self.columns[at]
        same_row = row_of[1:] == row_of[:-1]
        if bool((same_row & (flat[1:] <= flat[:-1])).any()):
            raise ValueError("blocks.columns must ascend strictly within each block row")

    @property
    def rows(self) -> int:
        """The number of block rows; they cover positions 0 … rows·S − 1."""
        return self.offsets.shape[1] - 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.offsets, self.columns, self.mask_ids, self.masks

    def to(self, device: torch.device | str) -> BlockIndex:
        """The same pattern on another device; attend needs it on q's."""
        return BlockIndex(self.size, *(t.to(device) for t in self.tensors()))

    @staticmethod
    def side_by_side(each: Sequence[tuple[BlockIndex, int]]) -> BlockIndex:
        """One pattern from several groups of heads, [(pattern, number of heads)]; all need one size and number of
        rows."""
        first, offsets, columns, masks = each[0][0], [], 0, 0
        if all(blocks is first for blocks, _ in each) and first.offsets.shape[0] == 1:
            return first
        ids = []
        for blocks, heads in each:
            if (blocks.size, blocks.rows) != (first.size, first.rows):
                raise ValueError(
                    f"patterns of {first.rows} rows of {first.size} and {blocks.rows} of {blocks.size} cannot share a "
                    "layer; expected one block size and one number of rows"
                )
            offsets.append((blocks.offsets + columns).expand(heads, -1))
            ids.append(torch.where(blocks.mask_ids == FULL, FULL, blocks.mask_ids + masks))
            columns, masks = columns + blocks.columns.numel(), masks + blocks.masks.shape[0]
        return BlockIndex(
            first.size, torch.cat(offsets), torch.cat([blocks.columns for blocks, _ in each]), torch.cat(ids),
            torch.cat([blocks.masks for blocks, _ in each]),
        )  # fmt: skip

    @staticmethod
    def from_dense(mask: Tensor, size: int) -> BlockIndex:
        """From a boolean [L, L] or [Hb, L, L] mask (query position, key position); for small L and for tests."""
        if size < 1:
            raise ValueError(f"size is {size}; expected at least 1 position per block")
        if mask.ndim not in (2, 3) or mask.dtype != torch.bool or not mask.numel():
            raise ValueError(
                f"mask has shape {list(mask.shape)} and dtype {mask.dtype}; "
                "expected [L, L] or [1 or H, L, L] of torch.bool"
            )
        mask = mask if mask.ndim == 3 else mask[None]
        heads, length, width = mask.shape
        rows, cols = -(-length // size), -(-width // size)
        padded = torch.zeros(heads, rows * size, cols * size, dtype=torch.bool)
        padded[:, :length, :width] = mask
        tiles = padded.view(heads, rows, size, cols, size).transpose(2, 3)
        covered = tiles.flatten(-2)
        # No pair beyond the mask's edge is visible, so an edge block counts as full if the part inside the mask is
        # full.
        inside = torch.zeros(rows * size, cols * size, dtype=torch.bool)
        inside[:length, :width] = True
        inside = inside.view(rows, size, cols, size).transpose(1, 2).flatten(-2)
        some, full = covered.any(-1), (covered | ~inside).all(-1)
        counts = some.sum(-1)
        offsets = torch.zeros(heads, rows + 1, dtype=torch.int64)
        offsets[:, 1:] = counts.cumsum(-1)
        offsets += torch.cat([torch.zeros(1, dtype=torch.int64), counts.sum(-1).cumsum(0)[:-1]])[:, None]
        where = some.nonzero()
        partial = some & ~full
        ids = torch.full(some.shape, FULL, dtype=torch.int64)
        ids[partial] = torch.arange(int(partial.sum()))
        return BlockIndex(size, offsets, where[:, 2].contiguous(), ids[some], tiles[partial])

    def visible(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Element mask [..., Hb, Tq, Tk] for positions [..., Tq] and [..., Tk]: dense; for the oracle and tests."""
        rows, cols = q_pos // self.size, k_pos // self.size
        width = max([int(t.max()) for t in (self.columns, cols) if t.numel()], default=0) + 1
        grid = torch.full((self.offsets.shape[0], self.rows, width), HIDDEN, dtype=torch.int64, device=cols.device)
        for h in range(grid.shape[0]):
            row_of, at = _spread(self.offsets[h, 1:] - self.offsets[h, :-1], self.offsets[h, :-1])
            grid[h, row_of, self.columns[at]] = self.mask_ids[at]
        ids = grid[:, rows.unsqueeze(-1), cols.unsqueeze(-2)]  # [Hb, ..., Tq, Tk]
        ids = ids.movedim(0, -3)
        if not self.masks.shape[0]:
            return ids == FULL
        inner = (q_pos % self.size)[..., None, :, None], (k_pos % self.size)[..., None, None, :]
        return (ids == FULL) | ((ids >= 0) & self.masks[ids.clamp(min=0), inner[0], inner[1]])

    def __and__(self, other: BlockIndex) -> BlockIndex:
        """The pairs that both patterns show."""
        return _combine(self, other, torch.logical_and)

    def __or__(self, other: BlockIndex) -> BlockIndex:
        """The pairs that either pattern shows."""
        return _combine(self, other, torch.logical_or)

    def for_heads(self, heads: Sequence[int]) -> BlockIndex:
        """The pattern of some heads, in the order given."""
        if self.offsets.shape[0] == 1:
            return self
        offsets = self.offsets[torch.tensor(heads, device=self.offsets.device)]
        return BlockIndex(self.size, offsets, self.columns, self.mask_ids, self.masks)

    def entries(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """(head · rows + row, column, mask id) of every stored block, in ascending order, for this many heads."""
        offsets = self.offsets.expand(heads, -1)
        starts, counts = offsets[:, :-1].flatten(), (offsets[:, 1:] - offsets[:, :-1]).flatten()
        line, at = _spread(counts, starts)
        return line, self.columns[at], self.mask_ids[at]

    @staticmethod
    def from_blocks(size: int, rows: int, row: Tensor, column: Tensor, ids: Tensor, masks: Tensor) -> BlockIndex:
        """From stored blocks in any order: row [N] (head · rows + row), column [N],
        mask ids [N] and masks [M, S, S]. No block may occur twice."""
        heads = int(row.max()) // rows + 1 if row.numel() else 1
        width = int(column.max()) + 1 if column.numel() else 1
        order = (row * width + column).argsort()
        counts = torch.bincount(row, minlength=heads * rows).view(heads, rows)
        ends = counts.flatten().cumsum(0).view(heads, rows)
        offsets = torch.cat([ends[:, :1] - counts[:, :1], ends], 1)
        return BlockIndex(size, offsets, column[order].contiguous(), ids[order].contiguous(), masks)

    @staticmethod
    def stack(indices: Sequence[BlockIndex]) -> BlockIndex:
        """One pattern for each head, in order. Heads with the same object share its blocks."""
        sizes, rows = {x.size for x in indices}, {x.rows for x in indices}
        if len(sizes) != 1 or len(rows) != 1 or any(x.offsets.shape[0] != 1 for x in indices):
            raise ValueError(
                f"blocks of sizes {sorted(sizes)} with {sorted(rows)} rows cannot be stacked; "
                "expected one size, one number of rows, and patterns of one head each"
            )
        unique = list({id(x): x for x in indices}.values())
        place, stored, known = {}, 0, 0
        for x in unique:
            place[id(x)] = stored, known
            stored, known = stored + x.columns.numel(), known + x.masks.shape[0]
        ids = [torch.where(x.mask_ids == FULL, FULL, x.mask_ids + place[id(x)][1]) for x in unique]
        return BlockIndex(
            indices[0].size,
            torch.cat([x.offsets + place[id(x)][0] for x in indices]),
            torch.cat([x.columns for x in unique]),
            torch.cat(ids),
            torch.cat([x.masks for x in unique]),
        )


def _spread(counts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of `counts` consecutive numbers from `starts` on: each number's run, and the number."""
    line = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    return line, torch.arange(line.numel(), device=counts.device) + (starts - counts.cumsum(0) + counts)[line]


def _combine(a: BlockIndex, b: BlockIndex, both: Callable[[Tensor, Tensor], Tensor]) -> BlockIndex:
    """Combine two patterns block by block; a block that a pattern does not store is hidden. The result covers the rows
    that both have. Each distinct pair of masks is combined once."""
    if a.size != b.size:
        raise ValueError(
            f"blocks of sizes {a.size} and {b.size} cannot be combined; rebuild one of them with the other's size"
        )
    heads, rows = max(a.offsets.shape[0], b.offsets.shape[0]), min(a.rows, b.rows)
    if any(x.offsets.shape[0] not in (1, heads) for x in (a, b)):
        raise ValueError(
            f"blocks of {a.offsets.shape[0]} and {b.offsets.shape[0]} heads cannot be combined; "
            "expected the same number, or 1 for a pattern that all heads share"
        )
    width = max([int(x.columns.max()) + 1 for x in (a, b) if x.columns.numel()], default=1)
    keys, ids = [], []
    for x in (a, b):
        line, column, mask = x.entries(heads)
        inside = line % x.rows < rows
        keys.append((((line // x.rows) * rows + line % x.rows) * width + column)[inside])
        ids.append(mask[inside])
    key = torch.cat(keys).unique()
    pair = torch.full((2, key.numel()), HIDDEN, dtype=torch.int64, device=key.device)
    for n in (0, 1):
        pair[n, torch.searchsorted(key, keys[n])] = ids[n]
    kinds, kind = pair.unique(dim=1, return_inverse=True)
    masks = both(_masks(a, kinds[0]), _masks(b, kinds[1]))
    some, full = masks.flatten(1).any(1), masks.flatten(1).all(1)
    partly = some & ~full
    new = torch.where(full, FULL, partly.cumsum(0) - 1)
    seen = some[kind]
    key, new_ids = key[seen], new[kind[seen]]
    offsets = torch.searchsorted(key, torch.arange(heads * rows + 1, device=key.device) * width)
    starts = torch.arange(heads, device=key.device)[:, None] * rows + torch.arange(rows + 1, device=key.device)
    return BlockIndex(a.size, offsets[starts], key % width, new_ids, masks[partly])


def _masks(x: BlockIndex, ids: Tensor) -> Tensor:
    """[n, S, S] element masks of mask ids, FULL and HIDDEN included."""
    if not x.masks.shape[0]:
        return (ids == FULL)[:, None, None].expand(-1, x.size, x.size)
    return (ids == FULL)[:, None, None] | ((ids >= 0)[:, None, None] & x.masks[ids.clamp(min=0)])
