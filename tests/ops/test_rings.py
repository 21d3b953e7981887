"""Decoding from per-head rings equals attention over the whole text, however often the rings have wrapped."""

from __future__ import annotations

import pytest
import torch

from spanformer import HeadCache, Rings, Rule, attend, attend_rings
from spanformer.ops import kernel
from spanformer.ops.decode.operator import arguments

BACKENDS = ["banded"] if kernel.problem() else ["native", "banded"]
B, H, HKV, D, DV, LENGTH = 2, 4, 2, 24, 40, 100
TERMS = {
    "plain": {},
    "bias": {"distance_bias": torch.randn(H, LENGTH, generator=torch.Generator().manual_seed(1))},
    "vectors": {"distance_vec": torch.randn(1, LENGTH, D, generator=torch.Generator().manual_seed(2))},
    "vectors per head": {"distance_vec": torch.randn(H, LENGTH, D, generator=torch.Generator().manual_seed(3))},
    "sink_logits": {"sink_logits": torch.randn(H, generator=torch.Generator().manual_seed(4))},
    "paper_compat": {"paper_compat": True},
    "values": {"distance_value": torch.randn(1, 9, DV, generator=torch.Generator().manual_seed(5))},
    "scale": {
        "distance_scale": torch.randn(H, LENGTH, generator=torch.Generator().manual_seed(6)),
        "distance_vec": torch.randn(1, LENGTH, D, generator=torch.Generator().manual_seed(2)),
        "distance_value": torch.randn(H, 9, DV, generator=torch.Generator().manual_seed(5)),
    },
}
NATIVE = [name for name, terms in TERMS.items() if not {"distance_value", "distance_scale"} & set(terms)]


def rings_of(k: torch.Tensor, v: torch.Tensor, capacity: list[int], newest: list[int]) -> Rings:
    """Write k and v [B, Hkv, T, ·] position by position, as a decoder would; slots never written hold NaN."""
    total, first = sum(capacity), [sum(capacity[:g]) for g in range(len(capacity))]
    keys = torch.full((k.shape[0], total, k.shape[3]), torch.nan, dtype=k.dtype)
    values = torch.full((v.shape[0], total, v.shape[3]), torch.nan, dtype=v.dtype)
    for b, last in enumerate(newest):
        for g, slots in enumerate(capacity):
            for p in range(last + 1):
                keys[b, first[g] + p % slots], values[b, first[g] + p % slots] = k[b, g, p], v[b, g, p]
    return Rings(keys, values, torch.tensor(capacity), torch.tensor(newest))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("newest", [[99, 37], [0, 5], [99, -1]], ids=str)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_attention_over_everything(terms, dynamic, newest, backend, dtype) -> None:
    if backend == "native" and terms not in NATIVE:
        backend = "auto"
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(*shape, generator=g).to(dtype)
        for shape in ((B, H, 1, D), (B, HKV, LENGTH, D), (B, HKV, LENGTH, DV))
    )
    span = torch.rand(B, H, 1, generator=g) * 40 if dynamic else torch.tensor([3.5, 20, 0, 60.0])
    rule = Rule(H, span=span, ramp=8.0, reach=[50, 50, 7, 50], **TERMS[terms])
    shift = int(rule.paper_compat)
    limits = rule.limits()
    capacity = [min(max(limits[2 * g : 2 * g + 2]) + shift, LENGTH) for g in range(HKV)]
    out, lse = attend_rings(q, rings_of(k, v, capacity, newest), rule, backend=backend)
    for b, last in enumerate(newest):
        seen, row = last + 1, span[b : b + 1] if dynamic else span
        terms64 = {name: t.double() if isinstance(t, torch.Tensor) else t for name, t in TERMS[terms].items()}
        truth = Rule(H, span=row.double(), ramp=8.0, reach=[50, 50, 7, 50], **terms64)
        if seen == 0:
            expected = (torch.zeros(1, H, 1, DV), torch.full((1, H, 1), -torch.inf))
            if rule.sink_logits is not None:
                expected = (expected[0], rule.sink_logits[None, :, None])
        else:
            expected = attend(
                q[b : b + 1].double(), k[b : b + 1, :, :seen].double(), v[b : b + 1, :, :seen].double(), truth,
                backend="reference",
            )  # fmt: skip
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[b : b + 1].double(), expected[0].double(), atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(lse[b : b + 1].double(), expected[1].double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_heads_are_cut_in_parts(backend) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, t, 64, generator=g) for t in (1, 3000, 3000))
    expected = attend(q.double(), k.double(), v.double(), Rule(1), backend="reference")
    for capacity in (3000, 3001, 5000):
        got = attend_rings(q, rings_of(k, v, [capacity], [2999]), Rule(1), backend=backend)
        torch.testing.assert_close(got.out.double(), expected.out, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif("native" not in BACKENDS, reason="the compiled kernel is not here")
def test_bit_identical_whatever_the_threads() -> None:
    q, k, v = (torch.randn(2, 2, t, 64) for t in (1, 4000, 4000))
    rings, before = rings_of(k[:, :1], v[:, :1], [4000], [3999, 3000]), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(attend_rings(q, rings, Rule(2), backend="native").out)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_visible_nan_reaches_the_output() -> None:
    k = torch.randn(1, 1, 20, 8)
    k[0, 0, 4] = torch.nan
    for backend in BACKENDS:
        seen = attend_rings(torch.randn(1, 1, 1, 8), rings_of(k, k, [20], [19]), Rule(1), backend=backend)
        assert seen.out.isnan().all()
        hidden = attend_rings(torch.randn(1, 1, 1, 8), rings_of(k, k, [10], [19]), Rule(1, reach=10), backend=backend)
        assert hidden.out.isfinite().all()


def test_bad_input_is_named() -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 20, 8)
    rings = rings_of(k, k, [10, 10], [19])
    with pytest.raises(ValueError, match="capacity of key/value head 0 is 10, but head 0 reaches 20 positions"):
        attend_rings(q, rings, Rule(2))
    with pytest.raises(ValueError, match="rings do not take key_bias"):
        attend_rings(q, rings, Rule(2, key_bias=torch.zeros(1, 1, 20)))
    with pytest.raises(ValueError, match="one query per row"):
        attend_rings(torch.randn(1, 2, 2, 8), rings, Rule(2, reach=5))
    with pytest.raises(ValueError, match=r"distance_bias has shape \[2, 4\]"):
        attend_rings(q, rings, Rule(2, reach=5, distance_bias=torch.zeros(2, 4)))
    with pytest.raises(ValueError, match="q has 2 heads, the rule 3"):
        attend_rings(q, rings, Rule(3, reach=5))
    with pytest.raises(ValueError, match="backend is 'flex'"):
        attend_rings(q, rings, Rule(2, reach=5), backend="flex")
    with pytest.raises(
        ValueError, match=r"capacity is \[10, 9\]; expected at least 1 slot per head and 20 in all, as keys has"
    ):
        Rings(rings.keys, rings.values, torch.tensor([10, 9]), rings.newest)
    with pytest.raises(ValueError, match=r"newest has shape \[2\].*int64 \[1\]"):
        Rings(rings.keys, rings.values, rings.capacity, torch.tensor([1, 2]))
    # what the kernel would read beyond the end of
    with pytest.raises(ValueError, match=r"values has dtype torch\.bfloat16 on cpu; expected torch\.float32 on cpu"):
        Rings(rings.keys, rings.values.bfloat16(), rings.capacity, rings.newest)
    with pytest.raises(ValueError, match=r"distance_vec has shape \[1, 5, 4\]; expected head size 8"):
        attend_rings(q, rings, Rule(2, reach=5, distance_vec=torch.zeros(1, 5, 4)))
    with pytest.raises(ValueError, match="span is on meta; expected cpu, where q is"):
        attend_rings(q, rings, Rule(2, reach=5, span=torch.zeros(2, device="meta")))
    elsewhere = Rings(rings.keys.to("meta"), rings.values.to("meta"), rings.capacity, rings.newest)
    with pytest.raises(ValueError, match="keys is on meta; expected cpu, where q is"):
        attend_rings(q, elsewhere, Rule(2, reach=5))
    with pytest.raises(ValueError, match=r"q has shape \[2, 1, 8\] and dtype torch.float32; rings take one query"):
        attend_rings(q[0], rings, Rule(2, reach=5))


def test_bad_rings_are_named() -> None:
    k, newest = torch.randn(1, 20, 8), torch.tensor([19])
    half = torch.tensor([8, 8])
    with pytest.raises(
        ValueError, match=r"capacity is \[8, 8\] with 3 sink tokens beside each; expected at least 1 slot per head"
    ):
        Rings(k, k, half, newest, sink_tokens=3)
    with pytest.raises(ValueError, match=r"oldest has shape \[1\].*expected int64 \[1, 2\] on the CPU"):
        Rings(k, k, half, newest, sink_tokens=2, oldest=newest)
    with pytest.raises(
        ValueError,
        match=r"keys has dtype torch\.float32; expected torch\.int8 or torch\.uint8 \(4 bits\) if scales are given",
    ):
        Rings(k, k, half, newest, sink_tokens=2, scales=(k[..., 0], k[..., 0]))
    with pytest.raises(ValueError, match=r"scales has shape \[1, 19\].*expected contiguous float32 \[1, 20\]"):
        Rings(k.to(torch.int8), k.to(torch.int8), half, newest, sink_tokens=2, scales=(k[:, 1:, 0], k[:, 1:, 0]))
    with pytest.raises(ValueError, match="sink_tokens is 0 in the rule and 2 in the rings; expected one number"):
        attend_rings(torch.randn(1, 2, 1, 8), Rings(k, k, half, newest, sink_tokens=2), Rule(2, reach=5))


def test_bad_rings_of_four_bits_are_named() -> None:
    codes, newest, ring = torch.zeros(1, 20, 16, dtype=torch.uint8), torch.tensor([19]), torch.tensor([20])
    scales = torch.zeros(1, 2, 20, dtype=torch.bfloat16)
    Rings(codes, codes, ring, newest, scales=(scales, scales), sizes=(8, 32))
    with pytest.raises(ValueError, match=r"expected contiguous bfloat16 \[1, 2, 20\] on cpu, for values of 8 numbers"):
        Rings(codes, codes, ring, newest, scales=(scales, scales.float()), sizes=(8, 8))
    with pytest.raises(ValueError, match=r"expected contiguous bfloat16 \[1, 4, 20\] on cpu, for keys of 33 numbers"):
        Rings(codes, codes, ring, newest, scales=(scales, scales), sizes=(33, 8))
    with pytest.raises(ValueError, match=r"sizes is \(8, 8\) and codes have shape \[1, 20, 8\]; expected \[1, 20, 16"):
        Rings(codes[..., :8], codes, ring, newest, scales=(scales, scales), sizes=(8, 8))


def test_operator_refuses_a_cache_of_four_bits() -> None:
    cache = HeadCache(1, [20], 8, bits=4)
    with pytest.raises(ValueError, match=r"bits is 4, and torch.compile and torch.export do not take.*or use bits=8"):
        arguments(cache.rings(), Rule(1, reach=20))


def test_values_too_wide_for_the_kernel_go_to_banded() -> None:
    q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 20, 8), torch.randn(1, 1, 20, 300)
    rings = rings_of(k, v, [20], [19])
    expected = attend(q.double(), k.double(), v.double(), Rule(1), backend="reference")
    torch.testing.assert_close(attend_rings(q, rings, Rule(1)).out.double(), expected.out, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="backend 'native' cannot serve this call"):
        attend_rings(q, rings, Rule(1), backend="native")


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend) -> None:
    rings = Rings(torch.zeros(0, 20, 8), torch.zeros(0, 20, 8), torch.tensor([20]), torch.zeros(0, dtype=torch.int64))
    assert attend_rings(torch.zeros(0, 1, 1, 8), rings, Rule(1), backend=backend).out.shape == (0, 1, 1, 8)
