"""Keys and values in 4 bits: the stated error, what is no number, and the same bytes from PyTorch and from C."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanformer import HeadCache, Rule
from spanformer.ops import kernel
from spanformer.ops.decode.codes import (
    GROUP,
    KEYS,
    VALUES,
    decode,
    encode,
    quantise_groups,
    restore_groups,
    rotate,
    vector_bytes,
)  # fmt: skip

SIZES = (1, 7, 16, 24, 33, 64, 80, 128, 256)


def stated(x: Tensor) -> Tensor:
    """The bound of `quantise_groups` for each number of x [n, D], with float32's rounding."""
    found = torch.empty_like(x, dtype=torch.float64)
    for a in range(0, x.shape[1], GROUP):
        some = x[:, a : a + GROUP].double()
        low, high = some.amin(1, keepdim=True), some.amax(1, keepdim=True)
        found[:, a : a + GROUP] = (high - low + low.abs() / 128) / 29 + some.abs().amax(1, keepdim=True) * 2.0**-22
    return found


def some(size: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes; with an offset, an outlier, equal numbers, zeros."""
    g = torch.Generator().manual_seed(size)
    x = torch.randn(60, size, generator=g) * 10.0 ** torch.randint(-6, 7, (60, 1), generator=g)
    x[10:20] += 100 * x[10:20, :1]
    x[20:30, 0] *= 1000
    x[30:40] = x[30:40, :1]
    x[40] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_numbers_are_off_by_at_most_what_is_stated(size: int, dtype: torch.dtype) -> None:
    x = some(size, dtype).float()
    x = x[x.isfinite().all(1)]  # in float16 some rows overflow
    codes, scales = quantise_groups(x)
    off = (restore_groups(codes, scales.double(), size) - x.double()).abs()
    assert (off <= stated(x)).all()
    assert size < 24 or (off > stated(x) / 2).any()  # the bound is not idle


@pytest.mark.parametrize("size", SIZES)
def test_keys_are_rotated_and_back(size: int) -> None:
    """The matrix is orthogonal and its own inverse: scores stay, and errors of rotated numbers bound a key's."""
    x, q = (torch.randn(20, size, generator=torch.Generator().manual_seed(n)).double() for n in (0, 1))
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close((rotate(x) * rotate(q)).sum(1), (x * q).sum(1))
    block = math.gcd(size, 1 << 20)
    first = rotate(torch.eye(size, dtype=torch.float64))[0]
    torch.testing.assert_close(first[:block].abs(), torch.full((block,), block**-0.5, dtype=torch.float64))
    key = decode(*encode(x, 4, KEYS), size, KEYS, torch.float64)
    bound = stated(rotate(x.float()))
    assert ((key - x).norm(dim=1) <= bound.norm(dim=1)).all()
    assert (((key - x) * q).sum(1).abs() <= (bound * rotate(q).abs()).sum(1)).all()


def test_a_number_that_is_none_is_passed_on() -> None:
    x = torch.randn(1, 64)
    for bad in (math.nan, math.inf, -math.inf, 3e38):
        x[0, 40] = bad
        x[0, 41] = -3e38
        value = decode(*encode(x, 4, VALUES), 64, VALUES)
        assert value[0, 32:].isnan().all() and value[0, :32].isfinite().all()
        assert decode(*encode(x, 4, KEYS), 64, KEYS).isnan().all()


def test_tiny_numbers_and_zeros() -> None:
    for size in (0.0, 1e-45, 1e-39, 2e-38):
        x = torch.full((1, 32), size) * torch.linspace(-1, 1, 32)
        found = decode(*encode(x, 4, VALUES), 32, VALUES)
        assert found.isfinite().all() and (found - x).abs().max() <= max(size / 14, 2e-37)


@pytest.mark.parametrize(("size", "held"), [(64, 40), (128, 80), (24, 20), (80, 60)])
def test_bytes_of_a_vector(size: int, held: int) -> None:
    """Half a byte a number, of a multiple of 32, and 4 bytes a group."""
    assert vector_bytes(size, 4) == held
    assert vector_bytes(size, 8) == size + 4 and vector_bytes(size, 16) == 2 * size
    for kind in (KEYS, VALUES):
        codes, scales = encode(torch.randn(1, size), 4, kind)
        assert codes.nbytes + scales.nbytes == held


@pytest.mark.skipif(bool(kernel.problem()), reason="the compiled kernel is not here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_both_backends_write_the_same_bytes(size: int, dtype: torch.dtype) -> None:
    caches = {name: HeadCache(60, [2, 1], size, 33, bits=4, dtype=dtype) for name in ("native", "banded")}
    rows, values = some(size, dtype), some(33, dtype)
    rows[50, 0], rows[51, 0], values[50, 0] = math.nan, math.inf, -math.inf
    for name, cache in caches.items():
        for turn in range(3):
            k = torch.stack([rows.roll(turn, 0), -rows.roll(turn + 1, 0)], 1)[:, :, None]
            v = torch.stack([values.roll(turn, 0), values], 1)[:, :, None]
            cache.attend(k, k, v, Rule(2, reach=[2, 1]), backend=name)
    native, banded = (cache.stored() for cache in caches.values())
    for name, found in native.items():
        torch.testing.assert_close(found, banded[name], rtol=0, atol=0, equal_nan=True)
