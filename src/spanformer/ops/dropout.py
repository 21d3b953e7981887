"""Attention dropout by a counter-based generator: whether a weight is kept depends only on (seed, batch, head,
query, key), so every backend drops the same weights, and the backward pass regenerates them instead of storing them.

The generator is murmur3's 32-bit finaliser over two hash keys, one for the query and one for the key; arithmetic is
modulo 2^32, done here in int64. The native kernel computes the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_U32 = 0xFFFFFFFF


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """[1] int64 from torch's generator, so that torch.manual_seed makes dropout reproducible."""
    where = generator.device if generator is not None else torch.device("cpu")
    return torch.randint(0, 1 << 62, (1,), generator=generator, device=where).to(device)


def mix(x: Tensor) -> Tensor:
    """murmur3's finaliser on int64 tensors holding 32-bit values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _U32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _U32
    return x ^ (x >> 16)


def keep(seed: Tensor, p: float, batch_head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """True where dropout keeps a weight. batch_head = b·H + h, query and key are indices; all broadcast together."""
    low, high = seed & _U32, (seed >> 32) & _U32
    base = mix(low ^ mix(high ^ mix(batch_head & _U32)))
    of_query = mix((base + query) & _U32)
    of_key = mix((base ^ 0x9E3779B9) + key & _U32)
    return mix(of_query ^ of_key) >> 8 >= threshold(p)


def threshold(p: float) -> int:
    """Dropout drops a weight whose 24-bit draw is below this."""
    return round(p * (1 << 24))
