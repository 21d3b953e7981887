"""Augmenting Self-attention with Persistent Memory (Sukhbaatar, Grave, Lample, Jegou, Joulin, 2019).
https://arxiv.org/abs/1907.01470

    a ∝ exp([q·k_context, q·(√D·m_key)] / √D)        out = a · [v_context, √N·m_value]

N learned key/value vectors for each head, visible to every token beside the text. They have no distance, so a separate
call attends to them, and its result is merged by lse. With enough of them a layer needs no feed-forward part.
Shapes: B batch, H heads, T queries, D head size, N vectors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.ops import Attended, Rule, attend


class Persistent(nn.Module):
    def __init__(self, heads: int, head_dim: int, vectors: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.randn(heads, vectors, head_dim) / math.sqrt(head_dim))
        """[H, N, D], multiplied by √D in use, so that one learning rate suits it and the projections"""
        self.value = nn.Parameter(torch.randn(heads, vectors, head_dim) / math.sqrt(vectors))
        """[H, N, D], multiplied by √N in use"""

    def forward(self, q: Tensor, *, backend: str = "auto", dropout: float = 0.0) -> Attended:
        """q [B, H, T, D] → attention over the vectors only, to be merged with attention over the text."""
        b, h, t, d = q.shape
        # no distances, so the batch can be one long row of queries: no per-row gradient of the vectors
        row = q.transpose(0, 1).reshape(1, h, b * t, d)
        # Apply the factors without multiplying the vectors: √D and 1/√D give a scale of 1, and
        # the output is multiplied by √N.
        rule = Rule(h, causal=False)
        found = attend(row, self.key[None], self.value[None], rule, backend=backend, dropout=dropout, scale=1.0)
        out = found.out * math.sqrt(self.value.shape[1])
        return Attended(
            out.view(h, b, t, d).transpose(0, 1),
            found.lse.view(h, b, t).transpose(0, 1),
        )
