"""Block-sparse patterns over positions, as indices rather than as an L × L mask.

Shapes: Hb is 1 (every head the same) or H; N is the number of stored blocks, M of element masks,
S the block size. Block row r holds the query positions r·S … r·S + S − 1, column c the key positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

FULL = -1  # the mask id of a block whose every pair is visible


@dataclass(frozen=True, eq=False)
class BlockIndex:
    """Which blocks of (query position, key position) pairs may be seen.

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
                f"expected that of columns, {list(self.columns.shape)}"
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
        row_of = torch.repeat_interleave(torch.arange(starts.numel()), (ends - starts).reshape(-1))
        flat = torch.cat([self.columns[a:b] for a, b in zip(self.offsets[:, 0], self.offsets[:, -1], strict=True)])
        same_row = row_of[1:] == row_of[:-1]
        if bool((same_row & (flat[1:] <= flat[:-1])).any()):
            raise ValueError("blocks.columns must ascend strictly within each block row")

    @property
    def rows(self) -> int:
        """How many block rows are described: positions 0 … rows·S − 1."""
        return self.offsets.shape[1] - 1

    def to(self, device: torch.device | str) -> BlockIndex:
        """The same pattern on a device; attend wants it where q is."""
        parts = (t.to(device) for t in (self.offsets, self.columns, self.mask_ids, self.masks))
        return BlockIndex(self.size, *parts)

    def for_heads(self, heads: Sequence[int]) -> BlockIndex:
        """The patterns of some heads; one that all share stays as it is."""
        if self.offsets.shape[0] == 1:
            return self
        return replace(self, offsets=self.offsets[torch.tensor(heads, device=self.offsets.device)])

    @staticmethod
    def side_by_side(each: Sequence[tuple[BlockIndex, int]]) -> BlockIndex:
        """The patterns of several groups of heads, [(pattern, how many heads)], of one size and number of rows."""
        first, offsets, columns, masks = each[0][0], [], 0, 0
        if all(blocks is first for blocks, _ in each) and first.offsets.shape[0] == 1:
            return first
        ids = []
        for blocks, heads in each:
            if (blocks.size, blocks.rows) != (first.size, first.rows):
                raise ValueError(
                    f"patterns of {first.rows} rows of {first.size} and {blocks.rows} of {blocks.size} cannot stand "
                    "side by side; expected one size and number"
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
        # Beyond the mask's own edge there is nothing to see, so an edge block counts as full when its real part is.
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
        grid = torch.full((self.offsets.shape[0], self.rows, width), FULL - 1, dtype=torch.int64, device=cols.device)
        for h in range(grid.shape[0]):
            a, b = int(self.offsets[h, 0]), int(self.offsets[h, -1])
            counts = self.offsets[h, 1:] - self.offsets[h, :-1]
            row_of = torch.repeat_interleave(torch.arange(self.rows, device=counts.device), counts)
            grid[h, row_of, self.columns[a:b]] = self.mask_ids[a:b]
        ids = grid[:, rows.unsqueeze(-1), cols.unsqueeze(-2)]  # [Hb, ..., Tq, Tk]
        ids = ids.movedim(0, -3)
        if not self.masks.shape[0]:
            return ids == FULL
        inner = (q_pos % self.size)[..., None, :, None], (k_pos % self.size)[..., None, None, :]
        return (ids == FULL) | ((ids >= 0) & self.masks[ids.clamp(min=0), inner[0], inner[1]])

    def __and__(self, other: BlockIndex) -> BlockIndex:
        """The pairs both patterns see."""
        if self.size != other.size:
            raise ValueError(f"blocks of sizes {self.size} and {other.size} cannot be intersected; rebuild one of them")
        heads, rows = max(self.offsets.shape[0], other.offsets.shape[0]), min(self.rows, other.rows)
        if any(x.offsets.shape[0] not in (1, heads) for x in (self, other)):
            raise ValueError(
                f"blocks of {self.offsets.shape[0]} and {other.offsets.shape[0]} heads cannot be intersected; "
                "expected one number, or 1 for a pattern all heads share"
            )
        offsets, columns, ids, masks = torch.zeros(heads, rows + 1, dtype=torch.int64), [], [], []
        for h in range(heads):
            offsets[h, 0] = len(columns)
            for r in range(rows):
                mine, theirs = self._row(h, r), other._row(h, r)
                for column in sorted(mine.keys() & theirs.keys()):
                    a, b = mine[column], theirs[column]
                    both = [x.masks[i] for x, i in ((self, a), (other, b)) if i != FULL]
                    mask = both[0] if len(both) == 1 else both[0] & both[1] if both else None
                    if mask is not None and not bool(mask.any()):
                        continue
                    columns.append(column)
                    ids.append(FULL if mask is None else len(masks))
                    if mask is not None:
                        masks.append(mask)
                offsets[h, r + 1] = len(columns)
        at = self.offsets.device
        stacked = torch.stack(masks) if masks else torch.zeros(0, self.size, self.size, dtype=torch.bool, device=at)
        kept = torch.tensor([columns, ids], dtype=torch.int64, device=at)
        return BlockIndex(self.size, offsets.to(at), kept[0], kept[1], stacked)

    def _row(self, head: int, row: int) -> dict[int, int]:
        h = head if self.offsets.shape[0] > 1 else 0
        a, b = int(self.offsets[h, row]), int(self.offsets[h, row + 1])
        return dict(zip(self.columns[a:b].tolist(), self.mask_ids[a:b].tolist(), strict=True))
