"""Keys and values of a KV cache in 8 or 4 bits.

8 bits: c_d = round(x_d / s), s = max |x| / 127; one float32 scale s for each vector.
4 bits: x_d ≈ low_g + step_g · c_d with c_d = 0 … 15, for each group g of 32 numbers; low and step are bfloat16. A key
is multiplied by a Hadamard matrix first (`rotate`, an orthogonal matrix, as in QuaRot,
https://arxiv.org/abs/2404.00456): a few of its numbers are much larger than the others and would set the step of their
group. Queries are multiplied by the same matrix, so scores stay q·k.

Shapes: N slots of a row, D numbers of a vector, P those rounded up to a multiple of 32, G groups. Two codes share a
byte: numbers i and 16 + i of each 32.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Bits = Literal[0, 4, 8]
"""bits of a number in a KV cache; 0: the model's dtype"""
BITS = (0, 4, 8)
CODES = {4: torch.uint8, 8: torch.int8}
SCALES = {4: torch.bfloat16, 8: torch.float32}
KEYS, VALUES = 0, 1
GROUP = 32
"""numbers that share a step, in 4 bits; codes fill whole groups"""
RECENT = 16
"""newest tokens that a KV cache in 4 bits also holds in 8"""


def check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}; expected 0, for the model's dtype, 8 or 4")


def code_bytes(size: int, bits: Literal[4, 8]) -> int:
    """Bytes of the codes of a vector of `size` numbers."""
    return size if bits == 8 else padded(size) // 2


def scales_shape(batch: int, slots: int, size: int, bits: Literal[4, 8]) -> tuple[int, ...]:
    """[B, N], or in 4 bits [B, 2·G, N]: the steps of all groups, then their lows; slots are innermost."""
    return (batch, slots) if bits == 8 else (batch, 2 * (padded(size) // GROUP), slots)


def vector_bytes(size: int, bits: int) -> int:
    """Bytes of a key or a value of `size` numbers in this many bits, its scales included."""
    if bits == 8:
        return size + 4
    return padded(size) // 2 + 4 * (padded(size) // GROUP) if bits == 4 else size * bits // 8


def slot_first(scales: Tensor) -> Tensor:
    """Scales as a ring stores them, with one entry or row for each slot: [B, N] or a view [B, N, 2·G]."""
    return scales if scales.ndim == 2 else scales.mT


def padded(size: int) -> int:
    return -(-size // GROUP) * GROUP


def encode(x: Tensor, bits: Literal[4, 8], kind: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of x [..., D]: codes [..., D] and scales [...], or in 4 bits [..., P / 2] and [..., 2·G]."""
    if bits == 8:
        return quantise(x)
    return quantise_groups(rotate(x.float()) if kind == KEYS else x.float())


def decode(codes: Tensor, scales: Tensor, size: int, kind: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., D] the vectors that `encode` was given, rounded; dtype: float32 or float64."""
    if codes.dtype == torch.int8:
        return codes.to(dtype) * scales[..., None].to(dtype)
    rows = restore_groups(codes, scales.to(dtype), size)
    return rotate(rows) if kind == KEYS else rows


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [..., D] to 8 bits: codes [..., D] int8 and one float32 scale [...] per row, the nearest multiples of
    max |x| / 127; the error is at most max |x| / 254 (and float32's rounding)."""
    wide = x.float()
    scale = wide.abs().amax(-1) / 127
    coded = scale >= torch.finfo(torch.float32).tiny  # False for NaN
    codes = torch.where(coded[..., None] & (scale < math.inf)[..., None], (wide / scale[..., None]).round(), 0)
    return codes.to(torch.int8), torch.where(scale.isfinite(), scale, math.nan)


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 x [..., D] to 4 bits: codes [..., P / 2] uint8, and the steps and lows [..., 2·G] of
    groups of 32 numbers. The error is at most (max − min + |min| / 128) / 29 of a group (and float32's rounding)."""
    size = x.shape[-1]
    full = torch.nn.functional.pad(x, (0, padded(size) - size)).unflatten(-1, (-1, GROUP))
    real = (torch.arange(padded(size), device=x.device) < size).view(-1, GROUP)
    low = -_up(-full.masked_fill(~real, math.inf).amin(-1))
    high = full.masked_fill(~real, -math.inf).amax(-1)
    step = _up((high - low) / 15)
    finite = (full.abs() < math.inf).all(-1) & step.isfinite() & low.isfinite()
    coded = real & (finite & (step >= torch.finfo(torch.float32).tiny))[..., None]
    codes = torch.where(coded, ((full - low[..., None]) / step[..., None]).round().clamp(max=15), 0)
    pairs = codes.to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2, GROUP // 2))
    step = torch.where(finite & (step < torch.finfo(torch.float32).tiny), 0, torch.where(finite, step, math.nan))
    scales = torch.cat([step, torch.where(finite, low, math.nan)], -1).bfloat16()
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2), scales


def restore_groups(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """[..., D] in the dtype of scales."""
    groups = scales.shape[-1] // 2
    pairs = codes.unflatten(-1, (-1, 1, GROUP // 2))
    found = torch.cat([pairs & 15, pairs >> 4], -2).flatten(-3).unflatten(-1, (groups, -1)).to(scales.dtype)
    return (found * scales[..., :groups, None] + scales[..., groups:, None]).flatten(-2)[..., :size]


def rotate(x: Tensor) -> Tensor:
    """x [..., D] times a symmetric orthogonal matrix: blocks of Hadamard's, as long as the largest power of two that
    divides D. Twice gives x again. csrc/nibbles.h adds in the same order."""
    size = x.shape[-1]
    block = size & -size
    n = 1
    while n < block:
        a, b = x.unflatten(-1, (-1, 2, n)).unbind(-2)
        x, n = torch.stack([a + b, a - b], -2).flatten(-3), 2 * n
    return x * torch.tensor(1 / math.sqrt(block), dtype=x.dtype)


def _up(x: Tensor) -> Tensor:
    """The nearest bfloat16 that is not below float32 x, as float32."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + (bits >= 0).int() * 0xFFFF) & -0x10000).view(torch.float32)
