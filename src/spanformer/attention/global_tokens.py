"""Global tokens of each example: gather them, attend from and to them, scatter the results back.

Shapes: B batch, H heads, T tokens, N global tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class GlobalTokens(NamedTuple):
    """The global tokens of each example, at most N."""

    index: Tensor
    """[1 or B, N], distinct in a row"""
    there: Tensor
    """[1 or B, N] bool, False for padding, where a row has fewer than N"""
    last: int | None = None
    """the largest index, if the host knows it"""

    def take(self, t: Tensor) -> Tensor:
        """[B, H, T, D] → [B, H, N, D]"""
        return t.gather(2, self.index[:, None, :, None].expand(t.shape[0], t.shape[1], -1, t.shape[3]))

    def ids(self, t: Tensor) -> Tensor:
        """[1 or B, T] → [1 or B, N]"""
        rows = max(len(t), len(self.index))
        return t.expand(rows, -1).gather(1, self.index.expand(rows, -1))

    def put(self, t: Tensor, new: Tensor) -> Tensor:
        """t [B, H, T, D] with these tokens replaced by new [B, H, N, D]."""
        new = torch.where(self.there[:, None, :, None], new, self.take(t))
        return t.scatter(2, self.index[:, None, :, None].expand_as(new), new)


def choose(mask: Tensor, most: int) -> GlobalTokens:
    index = mask.int().topk(min(most, mask.shape[1]), 1).indices
    return GlobalTokens(index, mask.gather(1, index))


def fixed(positions: Sequence[int], k: Tensor) -> GlobalTokens:
    index = torch.tensor([list(positions)], dtype=torch.int64, device=k.device)
    return GlobalTokens(index, torch.ones_like(index, dtype=torch.bool), max(positions, default=None))


def check_mask(mask: Tensor, most: int, k: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"view.global_attention_mask has shape {list(mask.shape)} and dtype {mask.dtype}; expected "
            f"[{k.shape[0]}, {k.shape[2]}] of torch.bool, True for global tokens"
        )
    counts = mask.sum(1)
    expected = f"expected at most {most} in each example; increase most to allow more"
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        few = (counts <= most).all()
        torch.ops.aten._assert_async.msg(few, f"view.global_attention_mask holds too many global tokens; {expected}")
    elif len(counts) and int(counts.max()) > most:
        raise ValueError(f"view.global_attention_mask holds {int(counts.max())} global tokens; {expected}")
