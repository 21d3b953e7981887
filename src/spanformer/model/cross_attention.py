"""Attention of a decoder's tokens to all states of an encoder. Attention Is All You Need (Vaswani et al., 2017), 3.2.3.
https://arxiv.org/abs/1706.03762

    a_ij ∝ exp(q_i·k_j / sqrt(D))        q from the decoder, k and v from the encoder, over all j that are no padding

Positions take no part: the two texts have no common ones. Where a source's token stands, its state must tell.
Shapes: B batch, T tokens of the decoder, S states of the encoder, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from spanformer.attention import View
from spanformer.memory import Source
from spanformer.model.layer import split_heads
from spanformer.model.linear import Linear
from spanformer.ops import attend


class CrossAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, *, dropout: float = 0.0, backend: str = "auto") -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dropout, self.backend = heads, kv_heads, dropout, backend
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
        q = split_heads(self.query(x), self.heads)
        dropout = self.dropout if self.training else 0.0
        rule = View(padding=source.padding).rule(self.heads, causal=False)
        found = attend(q, source.k, source.v, rule, backend=self.backend, dropout=dropout)
        return self.out(found.out.transpose(1, 2).reshape(x.shape))
