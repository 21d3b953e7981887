"""The Triton decoding kernel in the interpreter: equal to the portable one, on rings that wrap, of 8 bits, with sink
tokens; and models that train by segments, decode and attach with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer import HeadCache, Rings, Rule, attend_rings
from spanformer.ops.backends.triton import rings as launches

B, H, HKV, D, DV = 3, 6, 2, 16, 24
CAPACITY = [40, 21]
RULES = {
    "plain": {},
    "span": {"span": torch.tensor([30.0, 3.0, 2.5, 6.0, 10.0, 9.0]), "sink_logits": torch.randn(H)},
    "dynamic": {"span": torch.rand(B, H, 1) * 12, "distance_bias": torch.randn(H, 50)},
    "paper_compat": {"span": torch.tensor([0.0, 3.0, 7.5, 6.0, 10.0, 9.0]), "paper_compat": True},
}


def a_rule(terms: str, sink_tokens: int = 0) -> Rule:
    shift = 1 if terms == "paper_compat" else 0
    return Rule(H, reach=[40 - shift, 30, 12, 21 - shift, 5, 1], ramp=7.0, sink_tokens=sink_tokens, **RULES[terms])


def filled(sink_tokens: int = 0, bits=0, lengths=(50, 2, 19)) -> tuple[HeadCache, HeadCache]:
    """Twice the same: rows that have wrapped, that just began, and between."""
    torch.manual_seed(1)
    k, v = torch.randn(B, HKV, 50, D), torch.randn(B, HKV, 50, DV)
    caches = tuple(HeadCache(B, CAPACITY, D, DV, sink_tokens=sink_tokens, bits=bits) for _ in range(2))
    for cache in caches:
        cache.append(k, v, torch.tensor(lengths))
    return caches[0], caches[1]


def new_tokens() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, 1, D), torch.randn(B, HKV, 1, D), torch.randn(B, HKV, 1, DV)


@pytest.mark.parametrize(
    ("terms", "sink_tokens", "bits"),
    [("plain", 0, 0), ("span", 0, 0), ("span", 3, 0), ("span", 20, 8), ("dynamic", 0, 0), ("dynamic", 0, 8),
     ("paper_compat", 0, 0)],
)  # fmt: skip
def test_caches_decode_as_the_portable_kernel_does(terms: str, sink_tokens: int, bits) -> None:
    mine, portable = filled(sink_tokens, bits)
    rule = a_rule(terms, sink_tokens)
    for _ in range(3):
        q, k, v = new_tokens()
        got = mine.attend(q, k, v, rule, backend="triton")
        true = portable.attend(q, k, v, rule, backend="banded")
        torch.testing.assert_close(got, true, atol=3e-6, rtol=3e-6)
        assert torch.equal(mine.store.memory, portable.store.memory)


@pytest.mark.parametrize("parts", [1, 4])
def test_slots_in_parts_give_the_same(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "parts_for", lambda *_: parts)
    mine, portable = filled(3)
    q, k, v = new_tokens()
    got = mine.attend(q, k, v, a_rule("span", 3), backend="triton")
    true = portable.attend(q, k, v, a_rule("span", 3), backend="banded")
    torch.testing.assert_close(got, true, atol=3e-6, rtol=3e-6)


def test_unwritten_slots_and_empty_rows_are_not_read() -> None:
    keys, values = torch.full((B, 61, D), torch.nan), torch.full((B, 61, DV), torch.nan)
    keys[0, :40], values[0, :40] = torch.randn(40, D), torch.randn(40, DV)
    oldest = torch.tensor([[0, 100], [0, 0], [0, 0]])  # row 0, head 1: everything was lost
    rings = Rings(keys, values, CAPACITY, torch.tensor([39, -1, -1]), oldest=oldest)
    q, _, _ = new_tokens()
    got = attend_rings(q, rings, a_rule("plain"), backend="triton")
    true = attend_rings(q, rings, a_rule("plain"), backend="banded")
    torch.testing.assert_close(got, true, atol=3e-6, rtol=3e-6)
    assert (got.out[1:] == 0).all() and (got.lse[1:] == -torch.inf).all() and (got.out[0, 3:] == 0).all()


def test_half_precision() -> None:
    half = HeadCache(B, CAPACITY, D, DV, dtype=torch.float16)
    half.append(*(torch.randn(B, HKV, 30, n, dtype=torch.float16) for n in (D, DV)))
    q, k, v = (t.half() for t in new_tokens())
    other = half.rows(torch.arange(B))
    got = half.attend(q, k, v, a_rule("span"), backend="triton")
    true = other.attend(q, k, v, a_rule("span"), backend="banded")
    torch.testing.assert_close(got, true, atol=4e-3, rtol=4e-3)


def test_newest_positions_are_copied_once_for_all_layers() -> None:
    place = torch.tensor([4, 5])
    meta = torch.device("meta")
    first = launches.on(meta, place)
    assert launches.on(meta, place) is first
    place += 1
    assert launches.on(meta, place) is not first
    assert launches.on(place.device, place) is place


def test_refuses_what_rings_have_and_it_does_not() -> None:
    mine, _ = filled()
    q, k, v = new_tokens()
    rule = Rule(H, reach=[40, 40, 40, 21, 21, 21], distance_vec=torch.randn(1, 50, D))
    with pytest.raises(
        ValueError, match="backend 'triton' cannot serve this call: triton does not support distance_vec"
    ):
        mine.attend(q, k, v, rule, backend="triton")


def test_rings_in_4_bits_are_refused() -> None:
    mine, _ = filled(bits=4)
    q, k, v = new_tokens()
    with pytest.raises(ValueError, match="the rings hold 4 bits; triton reads 8 bits and full precision"):
        mine.attend(q, k, v, a_rule("plain"), backend="triton")
