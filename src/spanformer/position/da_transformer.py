"""DA-Transformer: Distance-aware Transformer (Wu, Wu, Huang, 2021). https://arxiv.org/abs/2010.06925

    s_ij = relu(q_i·k_j) · f_h(|i − j|) / sqrt(D)        f_h(d) = (1 + e^v) / (1 + e^(v − w·d))

f is 1 at distance 0. A head with w > 0 prefers far keys, up to 1 + e^v times; one with w < 0 prefers near keys.
relu gives irrelevant keys a score of 0, whatever their distance; exp(0) still has weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class DATransformer(Position):
    """w and v, two numbers for each head, start at 0: no distance is preferred."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; expected at least 1")
        self.w, self.v = (nn.Parameter(torch.zeros(heads)) for _ in range(2))
        """[H] each"""

    @classmethod
    def build(cls, spec: PositionSpec) -> DATransformer:
        return cls(spec.heads)

    def rule(self, view: Places, length: int) -> Rule:
        w, v = self.w[:, None], self.v[:, None]
        distance = torch.arange(max(length, 1), device=w.device)
        # (1 + e^v) · σ(w·d − v), which does not overflow at large distances
        return Rule(len(self.w), causal=False, distance_scale=F.softplus(v).exp() * (w * distance - v).sigmoid())

    def extra_repr(self) -> str:
        return f"heads={len(self.w)}"
