"""Self-attention: projections around a mechanism, a position encoding and the layer's memory.

Shapes: B batch, T new tokens, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor, nn

from spanformer.attention import Attention, View
from spanformer.memory import LayerCall, LayerMemory, Persistent
from spanformer.model.linear import Linear, product
from spanformer.ops import merge
from spanformer.position import Position


class SelfAttention(nn.Module):
    def __init__(
        self, dim: int, kv_heads: int, mechanism: Attention, persistent: Persistent | None, *, bias: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = mechanism.heads, kv_heads, dim // mechanism.heads
        self.mechanism, self.persistent = mechanism, persistent
        self.query = Linear(dim, dim, bias=bias)
        self.key = Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.value = Linear(dim, kv_heads * self.head_dim, bias=bias)
        self.out = Linear(dim, dim, bias=bias)
        mechanism.start_from(self.query, self.key, self.value)
        parts = [part for part in mechanism.modules() if isinstance(part, Attention)]
        self.all_queries = any(part.keys_are_queries for part in parts)
        """whether tokens that are not active need queries, which others see"""

    def forward(self, x: Tensor, memory: LayerMemory, view: View, position: Position) -> tuple[Tensor, Tensor | None]:
        """x [B, T, dim]; view: documents and padding of remembered and new tokens; position: the encoding, which layers
        may share. Returns [B, T, dim], or [N, dim] of the view's active tokens, and the mechanism's term of the
        loss."""
        q = split_heads(self._queries(x, view.active), self.heads)
        q = q if view.nobody else self.mechanism.map_queries(q)
        stored = view.stored(x.shape[1])
        v = split_heads(_of_tokens(self.value, x, stored), self.kv_heads)
        keys = functools.partial(self._keys, x, stored)
        call = LayerCall(self.mechanism, position, replace(view, x=x), q, keys, v, self.project, self.project_frozen)
        found, penalty = memory.attend(call)
        if view.nobody:
            return x.new_empty(0, x.shape[2]), penalty
        if self.persistent is not None:
            dropout = self.mechanism.dropout if self.training else 0.0
            beside = self.persistent(q, backend=self.mechanism.backend, dropout=dropout)
            found = merge([found, beside])
        return self.out(active_rows(found.out.transpose(1, 2).reshape(x.shape), view.active)), penalty

    def _queries(self, x: Tensor, active: Tensor | None) -> Tensor:
        """[B, T, dim], 0 for tokens that are not active, unless others see their queries."""
        return _of_tokens(self.query, x, None if self.all_queries else active)

    def _keys(self, x: Tensor, stored: Tensor | None) -> Tensor:
        return split_heads(_of_tokens(self.key, x, stored), self.kv_heads)

    def project(self, states: Tensor, kv_heads: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, T, D] of hidden states [B, T, dim], of some key/value heads or all."""
        return self._project(states, self.key, kv_heads), self._project(states, self.value, kv_heads)

    def project_frozen(self, states: Tensor, kv_heads: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """The same with weights that get no gradient, for losses of a mechanism's own."""
        heads = list(range(self.kv_heads)) if kv_heads is None else kv_heads
        return (
            self._project(states, self.key, heads, frozen=True),
            self._project(states, self.value, heads, frozen=True),
        )

    def _project(
        self, states: Tensor, linear: nn.Linear, kv_heads: list[int] | None, frozen: bool = False
    ) -> Tensor:  # fmt: skip
        if kv_heads is None:
            return split_heads(linear(states), self.kv_heads)
        weight, bias = (p if p is None or not frozen else p.detach() for p in (linear.weight, linear.bias))
        assert weight is not None
        weight = weight.view(self.kv_heads, self.head_dim, -1)[kv_heads].flatten(0, 1)
        bias = None if bias is None else bias.view(self.kv_heads, self.head_dim)[kv_heads].flatten()
        return split_heads(product(states, weight, bias), len(kv_heads))


def _of_tokens(linear: nn.Linear, x: Tensor, tokens: Tensor | None) -> Tensor:
    """linear(x) [B, T, out] of these tokens, as indices into B · T, and 0 of the others; None: of all."""
    if tokens is None:
        return linear(x)
    if not len(tokens):
        return x.new_zeros(*x.shape[:2], linear.out_features)
    rows = linear(active_rows(x, tokens))
    every = rows.new_zeros(x.shape[0] * x.shape[1], rows.shape[1]).index_copy(0, tokens, rows)
    return every.view(*x.shape[:2], -1)


def active_rows(x: Tensor, active: Tensor | None) -> Tensor:
    """x [B, T, dim], or its active tokens [N, dim]."""
    return x if active is None else x.flatten(0, 1).index_select(0, active)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · D] → [B, heads, T, D], without a copy."""
    # −1 cannot be inferred for an empty batch
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)
