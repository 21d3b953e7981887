"""Positions that a layer's rings had overwritten when they were resized, and each row's position at that time.

A ring that grows has room for positions that it no longer holds. A row that is cropped to before the resize must decode
as if it had never continued, in which case its ring would have held more.
Shapes: B batch, Hkv key/value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lost(NamedTuple):
    oldest: Tensor
    """[B, Hkv] positions below it are lost, though the ring has room for them"""
    place: Tensor
    """[B, Hkv] the position of the row's next token when the last of them were lost"""

    def add(self, oldest: Tensor, place: Tensor) -> Lost:
        """Positions below oldest [B, Hkv] are lost as well, for rows at place [B]."""
        more = oldest > self.oldest
        return Lost(torch.where(more, oldest, self.oldest), torch.where(more, place[:, None], self.place))

    def rows(self, index: Tensor) -> Lost:
        """The same for rows index: row b is a copy of row index[b]."""
        return Lost(self.oldest[index], self.place[index])

    def crop(self, place: Tensor) -> Lost:
        """For rows that are cropped to place [B]: tokens that they read after that are not lost."""
        return Lost(*(torch.minimum(t, place[:, None]) for t in self))

    def since(self, place: Tensor) -> Tensor:
        """[B, Hkv] positions below it were lost after the rows had passed place [B]; 0 where none were."""
        return torch.where(place[:, None] < self.place, self.oldest, 0)


def add_lost(lost: Lost | None, oldest: Tensor, place: Tensor, zeros: int) -> Lost | None:
    """`lost` after a resize of rows at place [B] whose rings hold no position below oldest [B, Hkv]. The zeros before a
    text are never lost."""
    if lost is None and not bool((oldest > zeros).any()):
        return None
    none = torch.full_like(oldest, zeros)
    return (lost or Lost(none, none)).add(oldest, place)


LOST = tuple(f"lost.{name}" for name in Lost._fields)
"""the names of its tensors in a file"""
