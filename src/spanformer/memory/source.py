"""Keys and values of the encoder's states for one layer of a decoder, computed once.

Shapes: B batch, S states of the encoder, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Source(NamedTuple):
    k: Tensor
    """[B, Hkv, S, D]"""
    v: Tensor
    """[B, Hkv, S, D]"""
    padding: Tensor | None
    """[B, S] bool, True for padding"""

    def rows(self, index: Tensor) -> Source:
        """The same for rows index: row b is a copy of row index[b]."""
        index = index.to(self.k.device)
        return Source(self.k[index], self.v[index], None if self.padding is None else self.padding[index])
