"""What decoding reads: the keys and values of all heads of a layer, in rings.

Shapes: B batch, Hkv key/value heads, D and Dv head sizes; N slots in all, Σ of the heads' capacities and sink slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.ops.decode.codes import CODES, SCALES, Bits, code_bytes, scales_shape


class Recent(NamedTuple):
    """The newest tokens of each row in 8 bits. Attention weighs them most: their rounding to 4 bits would cost several
    times what that of all others does."""

    rings: Rings
    """without sink tokens, whose capacities are at least `tokens`"""
    tokens: int
    """how many of the newest tokens are read from there"""
    since: Tensor
    """[B] int64 on the CPU: earlier positions are not held there"""

    def first(self, newest: Tensor) -> Tensor:
        """[B] the first position that is read from there."""
        return torch.maximum(self.since, newest + 1 - self.tokens)


@dataclass(frozen=True, eq=False)
class Rings:
    """Keys and values of all heads in one allocation. Head g's key at position p lies in slot
    first[g] + p mod capacity[g]; older positions have been overwritten. The first `sink_tokens` positions are in the
    `sink_tokens` slots before first[g] instead, and are never overwritten."""

    keys: Tensor
    """[B, N, D], in int8 with `scales`, or uint8 [B, N, P / 2] in 4 bits (codes.py)"""
    values: Tensor
    """[B, N, Dv]"""
    capacity: Tensor | Sequence[int]
    """[Hkv] slots of each key/value head, one head after the other. Stored as int64 on the CPU; inside torch.compile
    and torch.export, give numbers."""
    newest: Tensor
    """[B] int64 on the CPU: the position written last, which is the query's; −1 for an empty row"""
    sink_tokens: int = 0
    """how many first positions each head keeps beside its ring"""
    oldest: Tensor | None = None
    """[B, Hkv] int64 on the CPU: positions below it are missing, though the ring has room for them; None: none are"""
    scales: tuple[Tensor, Tensor] | None = None
    """float32 [B, N] each: the factors of 8-bit keys and values; bfloat16 [B, 2·G, N] each in 4 bits"""
    sizes: tuple[int, int] = (0, 0)
    """D and Dv; needed in 4 bits, since their codes are padded"""
    recent: Recent | None = None
    """beside rings in 4 bits: the newest tokens in 8 bits"""
    first: Tensor = field(init=False)
    """[Hkv] int64 on the CPU: the first slot of each head's ring"""
    capacities: list[int] = field(init=False)
    bits: Bits = field(init=False)

    def __post_init__(self) -> None:
        if self.keys.ndim != 3 or self.values.ndim != 3 or self.values.shape[:2] != self.keys.shape[:2]:
            raise ValueError(
                f"keys and values have shapes {list(self.keys.shape)} and {list(self.values.shape)}; "
                "expected [B, N, D] and [B, N, Dv]"
            )
        if self.values.dtype != self.keys.dtype or self.values.device != self.keys.device:
            raise ValueError(
                f"values has dtype {self.values.dtype} on {self.values.device}; "
                f"expected {self.keys.dtype} on {self.keys.device}, as keys has"
            )
        b, n, _ = self.keys.shape
        bits = {code: bits for bits, code in CODES.items()}.get(self.keys.dtype, 0)
        object.__setattr__(self, "bits", bits)
        if not any(self.sizes):
            object.__setattr__(self, "sizes", (self.keys.shape[2], self.values.shape[2]))
        self._check_scales(b, n)
        given, more = self.capacity, f" with {self.sink_tokens} sink tokens beside each" if self.sink_tokens else ""
        capacity = given if isinstance(given, Tensor) else torch.tensor(given)
        for name, t, shape in (
            ("capacity", capacity, (None,)),
            ("newest", self.newest, (b,)),
            ("oldest", self.oldest, (b, len(capacity))),
        ):
            _check_whole(name, t, shape)
        capacities = given.tolist() if isinstance(given, Tensor) else list(given)
        if (
            not capacities
            or min(capacities) < 1
            or self.sink_tokens < 0
            or sum(capacities) + self.sink_tokens * len(capacities) != n
        ):
            raise ValueError(
                f"capacity is {capacities}{more}; expected at least 1 slot per head and {n} in all, as keys has"
            )
        contiguous = capacity.contiguous()
        object.__setattr__(self, "capacity", contiguous)
        object.__setattr__(self, "first", (contiguous + self.sink_tokens).cumsum(0) - contiguous)
        object.__setattr__(self, "capacities", capacities)

    def _check_scales(self, b: int, n: int) -> None:
        if (self.scales is not None) != bool(self.bits):
            raise ValueError(
                f"keys has dtype {self.keys.dtype}; expected torch.int8 or torch.uint8 (4 bits) if scales are given, "
                "and another dtype if not"
            )
        for kind, (t, held, size) in enumerate(
            zip(self.scales or (), (self.keys, self.values), self.sizes, strict=False)
        ):
            assert self.bits
            shape, dtype = scales_shape(b, n, size, self.bits), SCALES[self.bits]
            if t.shape != shape or t.dtype != dtype or t.device != self.keys.device or not t.is_contiguous():
                raise ValueError(
                    f"scales has shape {list(t.shape)} and dtype {t.dtype} on {t.device}; expected contiguous "
                    f"{str(dtype).removeprefix('torch.')} {list(shape)} on {self.keys.device}, for "
                    f"{('keys', 'values')[kind]} of {size} numbers in {self.bits} bits"
                )
            if held.shape[2] != (found := code_bytes(size, self.bits)):
                raise ValueError(
                    f"sizes is {self.sizes} and codes have shape {list(held.shape)}; expected [{b}, {n}, {found}] for "
                    f"{size} numbers in {self.bits} bits"
                )


def _check_whole(name: str, t: Tensor | None, shape: tuple[int | None, ...]) -> None:
    if t is None:
        return
    fits = t.ndim == len(shape) and all(want in (None, got) for got, want in zip(t.shape, shape, strict=True))
    if t.dtype != torch.int64 or t.device.type != "cpu" or not fits:
        expected = f"int64 [{', '.join(str(n or 'Hkv') if n is None else str(n) for n in shape)}] on the CPU"
        raise ValueError(f"{name} has shape {list(t.shape)} and dtype {t.dtype} on {t.device}; expected {expected}")
