"""Where a memory of blocks (blocks.py) stores tokens and compressed slots, and which of them a piece sees.

Shapes: B batch, T new tokens, R ring, N compressed slots, n of a block, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from spanformer.memory.base import MemoryShape

Tensors = dict[str, Tensor]
NONE = -1
"""the position of an empty slot; the document of tokens without one"""


@dataclass(frozen=True)
class BlockSizes:
    dim: int
    block: int
    memory: int
    slots: int
    ratio: int
    most_used: bool
    far: tuple[int, ...]
    """key/value heads that see compressed slots; the others see the ring only"""

    @property
    def behind(self) -> int:
        """Blocks before its own that a token sees exactly."""
        return self.memory // self.block

    @property
    def per_block(self) -> int:
        return self.block // self.ratio

    @property
    def oldest(self) -> int:
        """Blocks before its own that a token sees at all."""
        return self.behind + self.slots // self.per_block


@dataclass(frozen=True)
class Piece:
    """New tokens first … last − 1 of a call, of one block in each row."""

    first: int
    last: int
    at: Tensor
    """[1 or B, t] positions"""
    block: Tensor
    """[1 or B] the number of the block"""
    start: int | None
    """the first position, where all rows have the same"""


@dataclass(frozen=True)
class Layout:
    shape: MemoryShape
    sizes: BlockSizes

    @property
    def ring(self) -> int:
        return self.sizes.memory + self.sizes.block + self.shape.slack

    @property
    def kept(self) -> int:
        """N: those that a token sees, and those that a crop brings back into sight."""
        return self.sizes.slots + self.sizes.per_block * -(-self.shape.slack // self.sizes.block)

    def groups(self) -> list[tuple[list[int], int]]:
        """Key/value heads with the number of compressed slots that they store."""
        near = [g for g in range(self.shape.kv_heads) if g not in self.sizes.far]
        return [(heads, slots) for heads, slots in ((near, 0), (list(self.sizes.far), self.kept)) if heads]

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype, float]]:
        """Shape, dtype and initial value of every tensor, the batch first."""
        b, d, dtype, slots = self.shape.batch, self.sizes.dim, self.shape.dtype, self.kept + self.ring
        found: dict[str, tuple[tuple[int, ...], torch.dtype, float]] = {
            "states": ((b, self.ring, d), dtype, 0),
            "at": ((b, slots), torch.int64, NONE),  # of compressed slots, then of the ring
            "document": ((b, slots), torch.int64, NONE),
            "room": ((b,), torch.int64, 0),  # tokens that can be taken back
        }
        if self.sizes.most_used:
            found["usage"] = ((b, self.ring), torch.float64, 0)
        if not self.shape.in_place:
            return found | {"slots": ((b, self.kept, d), dtype, 0)}
        for n, (heads, slots) in enumerate(self.groups()):
            size = (b, len(heads), slots + self.ring, self.shape.head_dim)
            found |= {f"keys{n}": (size, dtype, 0), f"values{n}": (size, dtype, 0)}
        return found

    def pieces(self, view: Any, new: int) -> list[Piece]:
        """The new tokens, cut where a block of any row begins."""
        block, device = self.sizes.block, self.shape.device
        at, start = view.q_positions, None
        if at is None:
            at, start = torch.arange(view.start, view.start + new, device=device)[None], view.start
            firsts = [start]
        else:
            at = at if at.ndim == 2 else at[None]
            firsts = at[:, 0].unique().tolist()
        cuts = sorted({0, new, *(t for first in firsts for t in range(-first % block, new, block))})
        return [
            Piece(a, b, at[:, a:b], at[:, a] // block, None if start is None else start + a)
            for a, b in pairwise(cuts)
        ]  # fmt: skip

    def first_exact(self, position: int) -> int:
        """The first position that the token at this one sees exactly."""
        return max(0, position // self.sizes.block * self.sizes.block - self.sizes.memory)

    def hidden(self, at: Tensor, piece: Piece, slots: int) -> Tensor:
        """[B, slots + …] bool: which of the compressed slots, and of the tokens behind them, no query sees."""
        block, sizes = at.div(self.sizes.block, rounding_mode="floor"), self.sizes
        age = piece.block[:, None] - block
        seen = torch.cat([
            (age[:, :slots] > sizes.behind) & (age[:, :slots] <= sizes.oldest),
            (age[:, slots:] <= sizes.behind) & (age[:, slots:] >= 0),
        ], 1)  # fmt: skip
        return ~seen | (at == NONE)


def placed(view: Any, q: Tensor, k: Tensor) -> Any:
    return replace(view, q_positions=q, k_positions=k, start=0, length=None)


def of_new(ids: Tensor | tuple[Tensor, Tensor] | None, new: int, some: slice) -> Tensor | None:
    """Of documents or padding [B, … + T], those of some of the T new tokens."""
    ids = ids[1] if isinstance(ids, tuple) else ids
    return None if ids is None else ids[:, ids.shape[1] - new :][:, some]
