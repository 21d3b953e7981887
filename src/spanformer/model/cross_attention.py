"""Attention of a decoder's tokens to all states of an encoder, with its projections; the equation is `attention.Cross`.

There are no distances: the two texts have no common positions. The encoder's states must encode positions.
Shapes: B batch, T tokens of the decoder, S states of the encoder, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from spanformer.attention import Attention, Cross, View
from spanformer.kinds import KINDS
from spanformer.kinds.spec import resolve
from spanformer.memory import Source
from spanformer.model.layer import split_heads
from spanformer.model.linear import Linear


def make_scoring(scoring: str, heads: int, head_dim: int) -> Attention:
    """`ModelConfig.cross`: the scaled dot product, or the scoring of an attention kind."""
    cross = Cross(heads)
    return cross if scoring == "scaled" else resolve(KINDS[scoring].scoring)(cross, head_dim)


class CrossAttention(nn.Module):
    def __init__(
        self, dim: int, heads: int, kv_heads: int, *, scoring: str = "scaled", dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        self.kv_heads, self.mechanism = kv_heads, make_scoring(scoring, heads, dim // heads)
        self.mechanism.dropout, self.mechanism.backend = dropout, backend
        inner = kv_heads * (dim // heads)
        self.query, self.out = Linear(dim, dim, bias=False), Linear(dim, dim, bias=False)
        self.key, self.value = Linear(dim, inner, bias=False), Linear(dim, inner, bias=False)

    def source(self, states: Tensor, padding: Tensor | None) -> Source:
        """Keys and values of the encoder's states [B, S, dim], computed once; padding [B, S] bool, True for
        padding."""
        k, v = (split_heads(project(states), self.kv_heads) for project in (self.key, self.value))
        return Source(k, v, padding)

    def forward(self, x: Tensor, source: Source) -> Tensor:
        """x [B, T, dim] → [B, T, dim]"""
        q = self.mechanism.map_queries(split_heads(self.query(x), self.mechanism.heads))
        view = View(padding=source.padding)
        found = self.mechanism(q, source.k, source.v, self.mechanism.rule(view), view)
        return self.out(found.out.transpose(1, 2).reshape(x.shape))
