"""Attention of a decoder's tokens to all states of an encoder, with its projections; the equation is `attention.Cross`.

Positions take no part: the two texts have no common ones. Where a source's token stands, its state must tell.
Shapes: B batch, T tokens of the decoder, S states of the encoder, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from spanformer.attention import Cross, View
from spanformer.memory import Source
from spanformer.model.layer import split_heads
from spanformer.model.linear import Linear


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, *, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        self.kv_heads, self.mechanism = kv_heads, Cross(heads)
        self.mechanism.dropout, self.mechanism.backend = dropout, backend
        inner = kv_heads * (dim // heads)
        self.query, self.out = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.key, self.value = Linear(dim, inner, bias=False), Linear(dim, inner, bias=False)

    def source(self, states: Tensor, padding: Tensor | None) -> Source:
        """Keys and values of the encoder's states [B, S, dim], made once; padding [B, S] bool, True where there is no
        token."""
        k, v = (split_heads(project(states), self.kv_heads) for project in (self.key, self.value))
        return Source(k, v, padding)

    def forward(self, x: Tensor, source: Source) -> Tensor:
        """x [B, T, dim] → [B, T, dim]"""
        q, view = split_heads(self.query(x), self.mechanism.heads), View(padding=source.padding)
        found = self.mechanism.mix(q, source.k, source.v, self.mechanism.rule(view), view)
        return self.out(found.out.transpose(1, 2).reshape(x.shape))
