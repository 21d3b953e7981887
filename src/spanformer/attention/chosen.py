"""Tokens that are told apart from the others of an example: taken out, looked at, put back.

Shapes: B batch, H heads, T tokens, N chosen ones, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """Some tokens of each example, at most N."""

    index: Tensor
    """[1 or B, N], distinct in a row"""
    there: Tensor
    """[1 or B, N] bool, False where a row has fewer than N: that entry stands for none"""
    last: int | None = None
    """the last of all, if the host knows"""

    def take(self, t: Tensor) -> Tensor:
        """[B, H, T, D] → [B, H, N, D]"""
        return t.gather(2, self.index[:, None, :, None].expand(t.shape[0], t.shape[1], -1, t.shape[3]))

    def ids(self, t: Tensor) -> Tensor:
        """[1 or B, T] → [1 or B, N]"""
        rows = max(len(t), len(self.index))
        return t.expand(rows, -1).gather(1, self.index.expand(rows, -1))

    def put(self, t: Tensor, new: Tensor) -> Tensor:
        """t [B, H, T, D] with new [B, H, N, D] in the places of these tokens."""
        new = torch.where(self.there[:, None, :, None], new, self.take(t))
        return t.scatter(2, self.index[:, None, :, None].expand_as(new), new)


def choose(chosen: Tensor, most: int) -> Chosen:
    index = chosen.int().topk(min(most, chosen.shape[1]), 1).indices
    return Chosen(index, chosen.gather(1, index))


def fixed(positions: Sequence[int], k: Tensor) -> Chosen:
    index = torch.tensor([list(positions)], dtype=torch.int64, device=k.device)
    return Chosen(index, torch.ones_like(index, dtype=torch.bool), max(positions, default=None))


def check_chosen(chosen: Tensor, most: int, k: Tensor) -> None:
    if chosen.dtype != torch.bool or chosen.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"view.chosen has shape {list(chosen.shape)} and dtype {chosen.dtype}; expected "
            f"[{k.shape[0]}, {k.shape[2]}] of torch.bool, True for global tokens"
        )
    counts = chosen.sum(1)
    expected = f"expected at most {most} in each example, as most says"
    if chosen.device.type != "cpu" or torch.compiler.is_compiling():
        few = (counts <= most).all()
        torch.ops.aten._assert_async.msg(few, f"view.chosen holds too many global tokens; {expected}")
    elif len(counts) and int(counts.max()) > most:
        raise ValueError(f"view.chosen holds {int(counts.max())} global tokens; {expected}")
