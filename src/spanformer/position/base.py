"""What a position encoding is: it may add to the hidden states, turn queries and keys, or say a Rule.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from spanformer.ops import Rule

Turner = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Places(Protocol):
    """The part of a view that says where queries and keys stand."""

    @property
    def q_positions(self) -> Tensor | None:
        """[Tq] or [B, Tq] integers, given with k_positions."""
        ...

    @property
    def k_positions(self) -> Tensor | None:
        """[Tk] or [B, Tk] integers. Without positions, queries are the last Tq of the keys."""
        ...


class Position(nn.Module):
    """The base of every encoding, and itself the one that tells nothing. Each overrides what it needs, `turn`
    and `turner` together."""

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        """x [B, T, dim], the embedded tokens (or a layer's input, for an encoding of that layer) at positions start,
        start + 1, …, or at positions [T] or [B, T]; absolute encodings add to them."""
        return x

    def turn(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        """q [B, H, Tq, D] and k [B, Hkv, Tk, D], each made to know where it stands."""
        return q, k

    def turn_of(self, heads: list[int]) -> Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]]:
        """`turn` for queries of these heads alone; the same for all, unless heads turn in ways of their own."""
        return self.turn

    def turner(self, positions: Callable[[], Tensor], dtype: torch.dtype) -> Turner | None:
        """What `turn` does to queries and keys [B, H, T, D] of the same tokens, at positions [T] or [B, T], made ready
        to be used by many layers: for keys that are kept turned. None: nothing. The positions are asked for only if
        they are needed."""
        return None

    def rule(self, view: Places, length: int) -> Rule | None:
        """What to add to the attention's rule, for distances 0 … length − 1.

        It is not causal, that is, it says nothing about the future: a sum of rules is causal if one of them is.
        """
        return None
