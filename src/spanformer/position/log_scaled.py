"""Queries scaled by the logarithm of how many tokens they see.

Overcoming a Theoretical Limitation of Self-Attention (Chiang, Cholak, 2022), §5.3, https://arxiv.org/abs/2202.12172
Scalable-Softmax Is Superior for Attention (Nakanishi, 2025), https://arxiv.org/abs/2501.19399

    s_ij = q_i·k_j / sqrt(D) · ln(i + 2) / ln(n)        for the query at position i, counted from 0

The largest weight of a softmax over i keys with bounded scores falls as 1 / i. With this factor it does not, so a head
that finds one token among n finds it among more. Another encoding goes in front: its rotations and rules over distances
are scaled with the product, its biases are not.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spanformer.ops import Rule
from spanformer.position.base import Encode, Places, Position


class LogScaled(Position):
    """inner: the encoding of positions. length: n, the number of tokens at which scores stay as they are."""

    def __init__(self, inner: Position, length: int) -> None:
        super().__init__()
        if length < 2:
            raise ValueError(f"length is {length}; expected at least 2 tokens")
        self.inner, self.length = inner, length

    @property
    def adds_rule(self) -> bool:
        return self.inner.adds_rule

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        return self.inner.embed(x, start)

    def rule(self, view: Places, length: int) -> Rule | None:
        return self.inner.rule(view, length)

    def encode(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        return self._scaled(self.inner.encode, q, k, view)

    def encode_for(self, heads: list[int]) -> Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]]:
        encode = self.inner.encode_for(heads)
        return lambda q, k, view: self._scaled(encode, q, k, view)

    def encode_at(self, positions: Callable[[], Tensor], dtype: torch.dtype, heads: list[int] | None = None) -> Encode:
        at = positions()
        inner, factor = self.inner.encode_at(lambda: at, dtype, heads), self.factor(at)

        def encode(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            q, k = (q, k) if inner is None else inner(q, k)
            return q * factor.to(q.dtype), k

        return encode

    def _scaled(
        self, encode: Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]], q: Tensor, k: Tensor, view: Places
    ) -> tuple[Tensor, Tensor]:
        at = view.q_positions
        if at is None:  # queries are the last of the keys
            first = view.start + k.shape[2] - q.shape[2]
            at = torch.arange(first, first + q.shape[2], device=q.device)
        q, k = encode(q, k, view)
        return q * self.factor(at).to(q.dtype), k

    def factor(self, positions: Tensor) -> Tensor:
        """positions [T] or [B, T] → factors that broadcast with [B, H, T, D], in float64."""
        scale = (positions.double() + 2).log()[..., None] / math.log(self.length)
        return scale[:, None] if positions.ndim == 2 else scale

    def extra_repr(self) -> str:
        return f"length={self.length}"
