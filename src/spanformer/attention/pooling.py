"""Keys and values of many tokens made into one: by block, as mean, maximum or strided convolution.

    mean  Σ_t x_t / number of tokens        max  max_t x_t, each number for itself        convolution  Σ_t w_t·x_t

over the tokens t of a block; w is a learned kernel as long as the block, for keys and for values, in each head. It has
one number a token, so that it does not matter where rotary positions begin. Padding takes no part.
Shapes: B batch, Hkv key/value heads, T tokens, D head size, N = ⌈T / size⌉ blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLINGS = ("mean", "max", "convolution")


class BlockPooling(nn.Module):
    def __init__(self, kv_heads: int, size: int, how: str) -> None:
        super().__init__()
        if how not in POOLINGS:
            raise ValueError(f"project is {how!r}; expected one of {', '.join(POOLINGS)}")
        if size < 1:
            raise ValueError(f"size is {size}; expected blocks of at least 1 token")
        self.size, self.how = size, how
        if how == "convolution":  # this variance leaves that of keys and values as it is
            self.weight = nn.Parameter(torch.randn(2, kv_heads, size) * size**-0.5)

    def forward(self, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """k and v [B, Hkv, T, D], padding [B, T] bool → pooled [B, Hkv, N, D] each, and which blocks [B or 1, N] have
        no token."""
        b, _, t, _ = k.shape
        more = -t % self.size
        there = torch.ones(1, t, dtype=torch.bool, device=k.device) if padding is None else ~padding
        there = F.pad(there, (0, more)).view(len(there), -1, self.size)  # [B or 1, N, size]
        blocks = (F.pad(x, (0, 0, 0, more)).view(b, x.shape[1], -1, self.size, x.shape[3]) for x in (k, v))
        pooled_k, pooled_v = (self._pool(x, there[:, None, :, :, None], n) for n, x in enumerate(blocks))
        return pooled_k, pooled_v, ~there.any(2)

    def _pool(self, x: Tensor, there: Tensor, which: int) -> Tensor:
        """x [B, Hkv, N, size, D], there [B or 1, 1, N, size, 1] bool"""
        if self.how == "max":
            most = x.masked_fill(~there, -torch.inf).amax(3)
            return most.masked_fill(~there.any(3), 0)
        x = x.masked_fill(~there, 0)  # and not times 0: padding may hold anything
        if self.how == "mean":
            return x.sum(3) / there.sum(3).clamp(min=1)
        return torch.einsum("bhntd,ht->bhnd", x, self.weight[which].to(x.dtype))

    def extra_repr(self) -> str:
        return f"size={self.size}, how={self.how!r}"
