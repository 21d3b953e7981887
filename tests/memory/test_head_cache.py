"""One layer's cache by itself: it gives what attention over the whole text gives, whatever rings, rows and sinks do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import HeadCache, Rule, attend
from spanformer.memory.slots import read_slots
from spanformer.ops import kernel
from spanformer.ops.decode.codes import Bits, quantise
from support.rounded import held

BACKENDS = ["banded"] if kernel.problem() else ["native", "banded"]
B, H, HKV, D, DV, LENGTH = 2, 4, 2, 24, 40, 130
REACH = [50, 50, 7, 12]  # of the heads; the second key/value head needs 12
RULES = {
    "plain": lambda: Rule(H, reach=REACH),
    "span": lambda: Rule(H, reach=REACH, span=torch.tensor([3.5, 20, 0, 4.0]), ramp=8.0),
    "bias": lambda: Rule(H, reach=REACH, distance_bias=torch.linspace(0, -3, H * 60).view(H, 60)),
    "vectors": lambda: Rule(H, reach=REACH, distance_vec=torch.linspace(-1, 1, 60 * D).view(1, 60, D)),
    "sink_logits": lambda: Rule(H, reach=REACH, sink_logits=torch.linspace(-1, 1, H)),
    "original": lambda: Rule(H, reach=[n - 1 for n in REACH], paper_compat=True),
    "sink_tokens": lambda: Rule(H, reach=REACH, sink_tokens=5),
    "kept, span, sinks": lambda: Rule(
        H,
        reach=REACH,
        sink_tokens=3,
        span=torch.tensor([3.5, 20, 0, 4.0]),
        ramp=8.0,
        sink_logits=torch.linspace(-1, 1, H),
    ),
}


def qkv(batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = (batch, H, LENGTH, D), (batch, HKV, LENGTH, D), (batch, HKV, LENGTH, DV)
    q, k, v = (torch.randn(*shape, generator=g) for shape in shapes)
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    return attend(q.double(), k.double(), v.double(), _double(rule), backend="reference").out


def _double(rule: Rule) -> Rule:
    names = ("span", "distance_bias", "distance_vec", "sink_logits")
    return replace(rule, **{n: None if getattr(rule, n) is None else getattr(rule, n).double() for n in names})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pieces", [[130], [1] * 130, [2, 1, 1, 60] + [1] * 20 + [46], [7] * 18 + [4]], ids=len)
@pytest.mark.parametrize("name", RULES)
def test_equals_attention_over_everything(name: str, pieces: list[int], backend: str) -> None:
    rule, (q, k, v) = RULES[name](), qkv()
    cache = HeadCache(B, [50, 12], D, DV, sink_tokens=rule.sink_tokens)
    found = [
        cache.attend(*some, rule, backend=backend).out
        for some in zip(*(t.split(pieces, 2) for t in (q, k, v)), strict=True)
    ]
    torch.testing.assert_close(torch.cat(found, 2).double(), truth(q, k, v, rule), atol=2e-5, rtol=2e-5)
    assert cache.seen.tolist() == [LENGTH] * B
    assert cache.bytes() == 4 * B * (50 + 12 + 2 * rule.sink_tokens) * (D + DV)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["span", "kept, span, sinks", "original"])
def test_rows_of_different_lengths(name: str, backend: str) -> None:
    rule, (q, k, v) = RULES[name](), qkv(4)
    expected, at = truth(q, k, v, rule), torch.zeros(4, dtype=torch.int64)
    cache = HeadCache(4, [50, 12], D, DV, sink_tokens=rule.sink_tokens)
    for n, lengths in enumerate(
        [[2, 0, 5, 1], [60, 13, 1, 0], [1, 1, 1, 1], [0, 20, 3, 2], [1, 1, 1, 1], [9, 9, 9, 9]]
    ):
        real, t = torch.tensor(lengths), max(lengths)
        rows = (at[:, None] + torch.arange(t)).clamp(max=LENGTH - 1)  # what lies beyond a row's length is padding
        index = torch.arange(4)[:, None]
        some = [x.transpose(1, 2)[index, rows].transpose(1, 2) for x in (q, k, v)]
        found = cache.attend(*some, rule, lengths=None if n in (2, 4, 5) else real, backend=backend).out
        for b in range(4):
            want = expected[b, :, at[b] : at[b] + lengths[b]]
            torch.testing.assert_close(found[b, :, : lengths[b]].double(), want, atol=2e-5, rtol=2e-5)
        at = at + real
        assert cache.seen.equal(at)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [[1] * 20, [20]], ids=len)
@pytest.mark.parametrize("reach", [[60, 30], [20, 12], [20, 40]], ids=str)
def test_grown_ring_does_not_see_overwritten_keys(reach: list[int], steps: list[int], backend: str) -> None:
    (q, k, v), kept = qkv(), 2
    cache = HeadCache(B, [50, 12], D, DV, sink_tokens=kept)
    cache.append(k[:, :, :100], v[:, :, :100])
    cache.resize(reach)
    assert cache.bytes() == 4 * B * (sum(reach) + 2 * kept) * (D + DV)
    rule = Rule(H, reach=[n for n in reach for _ in range(2)], sink_tokens=kept)
    bias = torch.zeros(1, HKV, 120, dtype=torch.float64)
    for g, was in enumerate((50, 12)):
        bias[0, g, kept : 100 - was] = -torch.inf
    hiding = rule + Rule(H, causal=False, key_bias=bias)
    expected = truth(q[:, :, 100:120], k[:, :, :120], v[:, :, :120], hiding)
    parts = [t[:, :, 100:120].split(steps, 2) for t in (q, k, v)]
    found = [cache.attend(*some, rule, backend=backend).out for some in zip(*parts, strict=True)]
    torch.testing.assert_close(torch.cat(found, 2).double(), expected, atol=2e-5, rtol=2e-5)
    cache.resize([50, 12])
    assert cache.bytes() == 4 * B * (62 + 2 * kept) * (D + DV)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [[1] * 20, [20]], ids=len)
@pytest.mark.parametrize("resize_first", [True, False], ids=["resize, crop", "crop, resize"])
def test_tokens_read_again_after_a_crop_below_the_sink_tokens_are_seen(
    resize_first: bool, steps: list[int], backend: str
) -> None:
    """A ring has forgotten positions that the kept slots hold; cropped below them, they are read again and seen."""
    (q, k, v), kept = qkv(), 5
    cache = HeadCache(B, [2, 2], D, DV, sink_tokens=kept, slack=2)
    cache.append(k[:, :, :9], v[:, :, :9])
    for change in ("resize", "crop") if resize_first else ("crop", "resize"):
        cache.resize([50, 12]) if change == "resize" else cache.crop(torch.tensor([0, 1]))
    rule = Rule(H, reach=REACH, sink_tokens=kept)
    parts = [torch.stack([t[0, :, :20], t[1, :, 1:21]]).split(steps, 2) for t in (q, k, v)]
    found = [cache.attend(*some, rule, backend=backend).out for some in zip(*parts, strict=True)]
    expected = truth(q[:, :, :21], k[:, :, :21], v[:, :, :21], rule)
    expected = torch.stack([expected[0, :, :20], expected[1, :, 1:]])
    torch.testing.assert_close(torch.cat(found, 2).double(), expected, atol=2e-5, rtol=2e-5)


def test_zeros_before_the_text_come_back_when_a_ring_grows() -> None:
    q, k, v = qkv()
    cache = HeadCache(B, [10, 10], D, DV, zeros=1 << 40)
    cache.append(k[:, :, :3], v[:, :, :3])
    cache.resize([30, 30])
    found = cache.attend(*(t[:, :, 3:4] for t in (q, k, v)), Rule(H, reach=30)).out
    before = [torch.cat([torch.zeros_like(t[:, :, :26]), t[:, :, :4]], 2) for t in (k, v)]
    expected = truth(q[:, :, 3:4], *before, Rule(H, reach=30))
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
    assert cache.seen.tolist() == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_bits_are_off_by_at_most_what_is_stated(dtype: torch.dtype) -> None:
    """The nearest of 255 steps: half a step, 1/254 of a row's largest number, and float32's rounding."""
    _, k, v = (t.to(dtype) for t in qkv())
    for x in (k, v, torch.zeros(3, 4, dtype=dtype)):
        codes, scale = quantise(x)
        off = (codes.double() * scale.double()[..., None] - x.double()).abs()
        assert (off <= x.double().abs().amax(-1, keepdim=True) * (1 / 254 + 1e-6)).all()
    codes, scale = quantise(torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]]))
    assert scale.isnan().all()  # a number that is none is passed on


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [[1] * 30, [30]], ids=len)
@pytest.mark.parametrize(("bits", "each", "more"), [(8, D + DV + 8, 0), (4, 20 + 40, 2 * 16 * (D + DV + 8))])
@pytest.mark.parametrize("name", ["kept, span, sinks", "vectors", "bias", "original"])
def test_few_bits_give_attention_to_rounded_keys_and_values(
    name: str, bits: Bits, each: int, more: int, steps: list[int], backend: str
) -> None:
    """each: bytes of a key and a value, in 4 bits half a byte of a multiple of 32 numbers and 4 bytes for each 32;
    more: the newest 16 tokens of both heads in 8 bits."""
    rule, (q, k, v) = RULES[name](), qkv()
    cache = HeadCache(B, [50, 12], D, DV, sink_tokens=rule.sink_tokens, bits=bits)
    cache.append(k[:, :, :100], v[:, :, :100])
    assert cache.bytes() == B * ((62 + 2 * rule.sink_tokens) * each + more)
    at = 100
    for count in steps:  # one token alone sees itself rounded too, a piece its own tokens as they are
        some = [t[:, :, at : at + count] for t in (q, k, v)]
        if count == 1:
            seen = [held(t[:, :, : at + 1], bits, kind) for kind, t in enumerate((k, v))]
        else:
            old = [held(t[:, :, :at], bits, kind) for kind, t in enumerate((k, v))]
            seen = [torch.cat([o, new.double()], 2) for o, new in zip(old, some[1:], strict=True)]
        found = cache.attend(*some, rule, backend=backend).out
        last = torch.cat([torch.zeros(B, H, at, D), some[0]], 2)
        expected = truth(last, *seen, rule)[:, :, at:]
        torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)
        at += count


def test_bad_input_is_named() -> None:
    q, k, v = (t[:, :, :3] for t in qkv())
    cache = HeadCache(B, [50, 12], D, DV)
    with pytest.raises(ValueError, match="head 2 sees 50 positions and the KV cache holds 12 for it"):
        cache.attend(q, k, v, Rule(H, reach=50))
    with pytest.raises(ValueError, match=r"v has shape \[2, 2, 3, 24\]; expected \[2, 2, 3, 40\]"):
        cache.attend(q, k, k, Rule(H, reach=5))
    with pytest.raises(ValueError, match="sink_tokens is 2 in the rule and 0 in the KV cache"):
        cache.attend(q, k, v, Rule(H, reach=5, sink_tokens=2))
    with pytest.raises(
        ValueError,
        match="expected a causal one without blocks, key_bias, key_span, forget, documents",
    ):
        cache.attend(q, k, v, Rule(H, reach=5, key_bias=torch.zeros(1, 1, 3)))
    with pytest.raises(ValueError, match=r"reach is \[0, 4\]; expected at least 1 position"):
        HeadCache(B, [0, 4], D)
    with pytest.raises(ValueError, match="reach has 1 numbers; expected one for each of 2 key/value heads"):
        cache.resize([4])
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; expected a floating-point dtype"):
        HeadCache(B, [4], D, dtype=torch.int8)
    for lengths in ([1, 4], [-1, 2], [1.0, 2.0], [1]):
        with pytest.raises(ValueError, match=r"lengths is \[.*\]; expected 2 numbers of real tokens, 0 … 3"):
            cache.attend(q, k, v, Rule(H, reach=5), lengths=torch.tensor(lengths))
    for heads in (1, 3):
        with pytest.raises(ValueError, match=rf"the rule has {heads} heads and the KV cache 2; expected"):
            cache.attend(q[:, :heads], k, v, Rule(heads, reach=5))
    assert cache.seen.tolist() == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_batch(backend: str) -> None:
    cache = HeadCache(0, [5, 5], D)
    for t in (1, 3):
        found = cache.attend(*(torch.zeros(0, h, t, D) for h in (H, HKV, HKV)), Rule(H, reach=5), backend=backend)
        assert found.out.shape == (0, H, t, D)


@pytest.mark.parametrize("backend", BACKENDS)
def test_step_with_other_options_ignores_the_prepared_call(backend: str) -> None:
    """What is prepared for the next token of the same kind must not be used for another kind."""
    rule, (q, k, v) = RULES["plain"](), qkv()
    cache = HeadCache(B, [50, 12], D, DV)
    first, second, third = ([t[:, :, n : n + 1] for t in (q, k, v)] for n in range(3))
    cache.attend(*first, rule, backend=backend)
    found = cache.attend(*second, rule, backend=backend, scale=3.0).out
    expected = attend(q[:, :, 1:2], k[:, :, :2], v[:, :, :2], rule, scale=3.0, backend="reference").out
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(ValueError, match=r"k has shape \[2, 1, 1, 24\]; expected \[2, 2, 1, 24\]"):
        cache.attend(third[0], third[1][:, :1], third[2], rule, backend=backend, scale=3.0)
    with pytest.raises(ValueError, match=r"v has dtype torch\.bfloat16 on cpu; expected torch\.float32 on cpu"):
        cache.attend(third[0], third[1], third[2].bfloat16(), rule, backend=backend, scale=3.0)
    strided = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in third]  # heads lie side by side
    assert strided[1].stride(3) != 1
    found = cache.attend(*strided, rule, backend=backend).out
    expected = truth(*(t[:, :, :3] for t in (q, k, v)), rule)[:, :, 2:]
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


def test_cropped_keys_stay_hidden_when_a_ring_grows() -> None:
    """Under zeros a ring that grows sees zeros beyond what it held, not tokens that were taken back."""
    _, k, v = qkv()
    for reach, left in ((4, 10), (1, 9)):
        cache = HeadCache(B, [reach, reach], D, DV, slack=3, zeros=1 << 40)
        cache.append(k[:, :, :13], v[:, :, :13])
        cache.crop(torch.tensor([left, left]))
        cache.resize([9, 9])
        held = torch.cat([torch.zeros(B, HKV, left, D), k[:, :, left:13]], 2)[:, :, :left]
        held[:, :, 13 - reach - 3 :] = k[:, :, 13 - reach - 3 : left]
        found, _ = read_slots(cache.store, cache.place, [0, 1], 9, torch.float32)
        assert torch.equal(found, held[:, :, left - 9 :])


def test_cache_works_in_inference_mode() -> None:
    _, k, v = (t[:, :, :9] for t in qkv())
    with torch.inference_mode():
        cache = HeadCache(B, [50, 12], D, DV, slack=4)
        cache.append(k, v)
        cache.resize([40, 12])
        some = cache.rows(torch.tensor([1]))
    for one in (cache, some):
        one.crop(torch.tensor([7] * one.batch))
        one.append(k[: one.batch], v[: one.batch])
        assert one.seen.tolist() == [16] * one.batch


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("sink_tokens", [0, 3])
def test_storing_one_token_equals_storing_many(bits: Bits, sink_tokens: int) -> None:
    """Rings that wrap and do not, rows together and apart."""
    k, v = torch.randn(2, 3, 31, 4), torch.randn(2, 3, 31, 4)
    many = HeadCache(2, [1, 7, 40], 4, bits=bits, sink_tokens=sink_tokens)
    ones = HeadCache(2, [1, 7, 40], 4, bits=bits, sink_tokens=sink_tokens)
    many.append(k, v, torch.tensor([31, 29]))
    ones.append(k[:, :, :2], v[:, :, :2], torch.tensor([2, 0]))
    for n in range(29):
        some = [torch.stack([t[0, :, n + 2 : n + 3], t[1, :, n : n + 1]]) for t in (k, v)]
        ones.append(some[0], some[1])
    for name, want in many.stored().items():
        assert torch.equal(ones.stored()[name], want), name
