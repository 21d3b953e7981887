"""Train Short, Test Long: Attention with Linear Biases (ALiBi; Press, Smith, Lewis, 2021).
https://arxiv.org/abs/2108.12409

    s_ij += −slope_h · (i − j)        slope_h = 2^(−8h / H),  h = 1 … H

For H between two powers of two, m < H < 2m, the first m heads have the slopes of m heads and the others every second
slope of 2m heads, from the first, as in the paper's code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.base import Places, Position


class Alibi(Position):
    _like: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; expected at least 1")
        self.heads = heads
        # An empty buffer follows the module's device and dtype. Slopes in a buffer would be rounded by a change of
        # dtype.
        self.register_buffer("_like", torch.zeros(0), persistent=False)

    @classmethod
    def build(cls, spec: PositionSpec) -> Alibi:
        return cls(spec.heads)

    def slopes(self) -> Tensor:
        """[H], in float32 or wider."""
        whole = 1 << (self.heads.bit_length() - 1)
        first = torch.arange(1, whole + 1, device=self._like.device)
        between = 2 * torch.arange(self.heads - whole, device=self._like.device) + 1
        exponent = torch.cat((2 * first, between)).to(torch.promote_types(self._like.dtype, torch.float32))
        return torch.exp2(exponent * (-4 / whole))

    def rule(self, view: Places, length: int) -> Rule:
        distance = torch.arange(max(length, 1), device=self._like.device)
        return Rule(self.heads, causal=False, distance_bias=-self.slopes()[:, None] * distance)

    def extra_repr(self) -> str:
        return f"heads={self.heads}"
