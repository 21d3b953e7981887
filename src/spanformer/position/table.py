"""The positions of Adaptive Attention Span in Transformers (Sukhbaatar et al., 2019), https://arxiv.org/abs/1905.07799,
after Self-Attention with Relative Position Representations (Shaw et al., 2018), https://arxiv.org/abs/1803.02155.

    s_ij = (q_i·k_j + q_i·r[d]) / sqrt(D)        d = i − j, or i − j − 1 with `paper_compat`
"""

from __future__ import annotations

import torch
from torch import nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class Table(Position):
    """One vector for each distance, shared by all heads, and by all layers that have the same object.

    `attend` raises an error for distances from `length` on. The table starts from N(0, 1), as in the paper's code.
    """

    def __init__(self, heads: int, head_dim: int, length: int) -> None:
        super().__init__()
        if heads < 1 or head_dim < 1 or length < 1:
            raise ValueError(f"heads is {heads}, head_dim {head_dim} and length {length}; expected at least 1 each")
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(length, head_dim))
        """[L, D]: row d belongs to distance d"""

    @classmethod
    def build(cls, spec: PositionSpec) -> Table:
        return cls(spec.heads, spec.head_dim, spec.max_distance)

    def rule(self, view: Places, length: int) -> Rule:
        return Rule(self.heads, causal=False, distance_vec=self.weight[None, :length])

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.weight.shape[1]}, length={self.weight.shape[0]}"
