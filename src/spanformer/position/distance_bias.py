"""A learned bias for each head and distance, in the manner of T5 (Raffel et al., 2019) without its buckets.
https://arxiv.org/abs/1910.10683

    s_ij += b_h[min(i − j, L − 1)]
"""

from __future__ import annotations

import torch
from torch import nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class DistanceBias(Position):
    """Starts at 0: no distance is preferred. Distances beyond the table read its last entry."""

    def __init__(self, heads: int, length: int) -> None:
        super().__init__()
        if heads < 1 or length < 1:
            raise ValueError(f"heads is {heads} and length {length}; expected at least 1 each")
        self.bias = nn.Parameter(torch.zeros(heads, length))
        """[H, L]"""

    @classmethod
    def build(cls, spec: PositionSpec) -> DistanceBias:
        return cls(spec.heads, spec.max_distance)

    def rule(self, view: Places, length: int) -> Rule:
        heads, known = self.bias.shape
        bias = self.bias
        if length > known:
            bias = torch.cat((bias, bias[:, -1:].expand(-1, length - known)), 1)
        return Rule(heads, causal=False, distance_bias=bias)

    def extra_repr(self) -> str:
        return f"heads={self.bias.shape[0]}, length={self.bias.shape[1]}"
