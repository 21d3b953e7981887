"""Keys and values as a KV cache of 8 or 4 bits holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops.decode.codes import RECENT, Bits, decode, encode


def rounded(x: Tensor, bits: Bits, kind: int) -> Tensor:
    """x [..., D] as it is stored, in float64; kind 0: keys, 1: values."""
    return decode(*encode(x, bits, kind), x.shape[-1], kind, torch.float64) if bits else x.double()


def held(x: Tensor, bits: Bits, kind: int, since: int = 0, sink_tokens: int = 0) -> Tensor:
    """x [..., N, D] as a cache that holds these N tokens gives them: in 4 bits the newest 16 have 8, but none before
    position `since` and no sink tokens."""
    found, near = rounded(x, bits, kind), max(since, x.shape[-2] - RECENT, sink_tokens)
    return found if bits != 4 else torch.cat([found[..., :near, :], rounded(x[..., near:, :], 8, kind)], -2)
