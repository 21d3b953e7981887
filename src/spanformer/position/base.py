"""The base class of position encodings: they add to hidden states, encode queries and keys, or return a Rule.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule

Encode = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Places(Protocol):
    """The part of a view that holds the positions of queries and keys."""

    @property
    def q_positions(self) -> Tensor | None:
        """[Tq] or [B, Tq] integers, given with k_positions."""
        ...

    @property
    def k_positions(self) -> Tensor | None:
        """[Tk] or [B, Tk] integers. Without positions, queries are the last Tq of the keys."""
        ...

    @property
    def start(self) -> int:
        """The position of the first key, where none are given."""
        ...


class Position(nn.Module):
    """The base of every encoding; its methods do nothing. Override those that are needed, `encode`
    and `encode_at` together."""

    @property
    def rotates(self) -> bool:
        """Whether it changes queries and keys, instead of only adding to the tokens or to the rule."""
        return type(self).encode is not Position.encode

    @property
    def absolute(self) -> bool:
        """Whether it only adds to the tokens: queries, keys and rules stay as they are."""
        return type(self).encode is Position.encode and type(self).rule is Position.rule

    @property
    def adds_rule(self) -> bool:
        """Whether it adds terms over distances to the attention's rule."""
        return type(self).rule is not Position.rule

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        """x [B, T, dim], the embedded tokens (or a layer's input, for an encoding of that layer) at positions start,
        start + 1, …, or at positions [T] or [B, T]; absolute encodings add to them."""
        return x

    def encode(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        """q [B, H, Tq, D] and k [B, Hkv, Tk, D], with their positions encoded."""
        return q, k

    def encode_for(self, heads: list[int]) -> Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]]:
        """`encode` for queries of these heads only; override it if heads differ."""
        return self.encode

    def encode_at(
        self, positions: Callable[[], Tensor], dtype: torch.dtype, heads: list[int] | None = None
    ) -> Encode | None:
        """`encode` for queries and keys [B, H, T, D] of the same tokens, at positions [T] or [B, T], for use by many
        layers; a KV cache stores encoded keys. None: no encoding. heads: as in `encode_for`. The positions
        are computed only if they are needed."""
        return None

    def for_heads(self, first: int, heads: int) -> Position:
        """The encoding for some heads of a layer: `first` and those after it."""
        return SomeHeads(self, list(range(first, first + heads)))

    def rule(self, view: Places, length: int) -> Rule | None:
        """The rule to add to the attention's rule, for distances 0 … length − 1.

        It is not causal: a sum of rules is causal if one of them is.
        """
        return None


class SomeHeads(Position):
    """An encoding restricted to some heads of a layer whose other heads have another kind of memory."""

    def __init__(self, whole: Position, heads: list[int]) -> None:
        super().__init__()
        self._whole, self._heads = (whole,), heads  # in a tuple, so that its parameters are not registered twice

    @property
    def rotates(self) -> bool:
        return self._whole[0].rotates

    @property
    def absolute(self) -> bool:
        return self._whole[0].absolute

    @property
    def adds_rule(self) -> bool:
        return self._whole[0].adds_rule

    def encode(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        return self._whole[0].encode_for(self._heads)(q, k, view)

    def encode_for(self, heads: list[int]) -> Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]]:
        return self._whole[0].encode_for([self._heads[h] for h in heads])

    def encode_at(
        self, positions: Callable[[], Tensor], dtype: torch.dtype, heads: list[int] | None = None
    ) -> Encode | None:
        some = self._heads if heads is None else [self._heads[h] for h in heads]
        return self._whole[0].encode_at(positions, dtype, some)

    def rule(self, view: Places, length: int) -> Rule | None:
        whole = self._whole[0].rule(view, length)
        return None if whole is None else whole.for_heads(self._heads)


def build(spec: PositionSpec) -> Position:
    """No position encoding."""
    return Position()
