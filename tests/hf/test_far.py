"""Linear states beyond the spans of a Hugging Face model: the equation, the memory, and what is refused."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from support.hf_models import tiny, tokens

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from spanformer import hf
from spanformer.hf.attention import Seen, attend_seen
from spanformer.hf.far import FarMap
from spanformer.hf.fit import set_windows
from spanformer.hf.spans import HeadSpans, state_bytes
from spanformer.ops.decode.codes import Bits

RAMP, SINKS, MAX = 5, 3, 37


def far_layer(heads: int = 4, kv_heads: int = 2, features: int = 3, size: int = 8, on: tuple[bool, ...] = (True, True)):
    """Spans within a text of 37 tokens, and features far from their initial values."""
    torch.manual_seed(3)
    far = FarMap(heads, kv_heads, features, size, size, MAX)
    spans = HeadSpans(
        heads, kv_heads, MAX, ramp=RAMP, init=0.5, per="kv_head", sink_tokens=SINKS, head_size=2 * size, far=far
    )
    stir(spans)
    far.on.copy_(torch.tensor(on))
    return spans


@torch.no_grad()
def stir(spans: HeadSpans) -> None:
    spans.ratio.uniform_(0.0, 0.6)
    far = spans.far
    assert far is not None
    for p in (far.query_bias, far.key_bias, far.mass_weight):
        p.normal_(0, 0.5)
    far.query_weight.add_(0.3 * torch.randn_like(far.query_weight))
    far.mass_bias.uniform_(-2, 1)


def dense_weights(spans: HeadSpans, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """[B, H, T, T], written from the equation, for any dtype."""
    far, group, t = spans.far, q.shape[1] // k.shape[1], q.shape[2]
    assert far is not None
    k = k.repeat_interleave(group, 1)
    i = torch.arange(t)
    d = (i[:, None] - i).to(q.dtype)
    on = far.on.repeat_interleave(group)
    m = ((spans.span_tokens().to(q.dtype)[:, None, None] + spans.ramp - d) / spans.ramp).clamp(0, 1)
    m = torch.where(on[:, None, None] | (d < spans.max_span), m, 0)
    m = torch.where(i < spans.sink_tokens, 1.0, m)
    exact = m * (q @ k.transpose(2, 3) * scale).exp()
    phi = (torch.einsum("bhtd,hmd->bhtm", q, far.query_weight.to(q.dtype)) + far.query_bias[:, None]).softmax(-1)
    weight, bias = (t.to(q.dtype).repeat_interleave(group, 0) for t in (far.key_weight, far.key_bias))
    psi = (torch.einsum("bhtd,hmd->bhtm", k, weight) + bias[:, None]).softmax(-1)
    mass = (torch.einsum("bhtd,hd->bht", q, far.mass_weight.to(q.dtype)) + far.mass_bias[:, None]).exp()
    linear = (1 - m) * mass[..., None] * (phi @ psi.transpose(2, 3)) * on[:, None, None]
    return torch.where(d >= 0, exact + linear, 0)


def dense(spans: HeadSpans, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    weights = dense_weights(spans, q, k, scale)
    return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1) / weights.sum(-1, keepdim=True)


def rotated(t: int, heads: int = 4, kv_heads: int = 2, size: int = 8, dtype: torch.dtype = torch.float64):
    """q, k with rotary positions, and v, as a layer of Llama gives them to its attention function."""
    torch.manual_seed(t)
    q, k, v = (torch.randn(2, n, t, size, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    angle = torch.arange(t).double()[:, None] * 100.0 ** -(torch.arange(0, size, 2).double() / size)
    angle = torch.cat([angle, angle], -1)[None]
    q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
    return [x.to(dtype).requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("t", [1, 31, 32, 33, 101])
@pytest.mark.parametrize("on", [(True, True), (False, True)])
def test_far_is_the_equation_with_every_gradient(t: int, on: tuple[bool, bool]) -> None:
    spans, parts = far_layer(on=on).double(), rotated(t)
    pull = torch.randn(2, 4, t, 8, dtype=torch.float64)
    named = dict(spans.named_parameters())
    inputs = [*parts, *named.values()]
    got, truth = attend_seen(*parts, Seen(t, None), spans, 0.0, 0.4, None), dense(spans, *parts, 0.4)
    assert torch.allclose(got, truth, rtol=1e-10, atol=1e-12)
    found, wanted = (torch.autograd.grad((x * pull).sum(), inputs, allow_unused=True) for x in (got, truth))
    for name, a, b in zip(["q", "k", "v", *named], found, wanted, strict=True):
        assert b is not None
        a = torch.zeros_like(b) if a is None else a
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-10), name
    if t > 40:
        assert all(float(p.abs().max()) > 1e-6 for p in wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_near_as_exact_attention(dtype: torch.dtype) -> None:
    spans, parts = far_layer(), rotated(101, dtype=dtype)
    exact = [x.detach().double() for x in parts]
    truth = dense(copy.deepcopy(spans).double(), *exact, 0.4)
    with torch.no_grad():
        off = (attend_seen(*parts, Seen(101, None), spans, 0.0, 0.4, None) - truth).abs().max()
    rounded = (truth.to(dtype) - truth).abs().max()
    assert off < (4 * rounded if dtype is torch.bfloat16 else 2e-6)


def far_model(ramp: float = RAMP, **changes: object):
    model = tiny("llama", **changes)
    hf.attach(model, max_span=60, ramp=ramp, sink_tokens=SINKS, far_features=3)
    torch.manual_seed(4)
    for spans in hf.head_spans(model).values():
        stir(spans)
    return model.requires_grad_(False)


def test_whole_spans_are_full_attention_exactly() -> None:
    model, ids = far_model(), tokens(2, 50)
    plain = hf.attach(tiny("llama"), max_span=60, ramp=RAMP, sink_tokens=SINKS)
    for spans in hf.head_spans(model).values():
        with torch.no_grad():
            spans.ratio.fill_(1.0)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
        grad_path = hf.head_spans(model)
        for spans in grad_path.values():
            spans.ratio.requires_grad_(True)
    assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5)  # with the far part computed, and empty


def test_a_model_is_the_equation_in_every_layer() -> None:
    model, ids = far_model(), tokens(2, 63)
    layers = list(hf.head_spans(model).values())
    got = model(ids).logits

    def oracle(module, query, key, value, attention_mask, scaling=None, **_):
        spans = copy.deepcopy(layers[module.layer_idx]).double()
        out = dense(spans, query.double(), key.double(), value.double(), scaling)
        return out.transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("dense_far", oracle)
    AttentionMaskInterface.register("dense_far", lambda **_: None)
    model.set_attn_implementation("dense_far")
    truth = model(ids).logits
    assert (got - truth).abs().max() < 2e-5 * truth.abs().max()
    for spans in layers:
        spans.far.on.fill_(False)  # type: ignore[union-attr]
    model.set_attn_implementation("spanformer")
    assert (model(ids).logits - truth).abs().max() > 1e-2 * truth.abs().max()  # the states matter here


def test_a_new_state_hardly_changes_the_model() -> None:
    ids = tokens(2, 60)
    plain = hf.attach(tiny("llama"), max_span=60, init=0.2, ramp=4)
    far = hf.attach(tiny("llama"), max_span=60, init=0.2, ramp=4, far_features=4)
    full = hf.attach(tiny("llama"), max_span=60)
    with torch.no_grad():
        a, b, c = (m(ids).logits for m in (plain, far, full))
    assert 0 < (a - b).abs().max() < 0.2 * (a - c).abs().max()


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_joins_no_state(side: str) -> None:
    model, ids = far_model(), tokens(2, 60)
    mask = torch.ones_like(ids)
    hidden = {"left": slice(0, 9), "right": slice(51, 60), "middle": slice(20, 29)}[side]
    mask[0, hidden] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    real = mask[0].bool()
    got = model(ids, attention_mask=mask, position_ids=positions).logits
    alone = model(ids[:1, real]).logits
    assert torch.allclose(got[0, real], alone[0], atol=2e-5)
    assert torch.allclose(got[1], model(ids[1:]).logits[0], atol=2e-5)


def test_packed_texts_have_states_of_their_own() -> None:
    model, ids = far_model(), tokens(1, 90)
    positions = torch.cat([torch.arange(48), torch.arange(42)])[None]
    got = model(ids, position_ids=positions, use_cache=False).logits
    for part in (slice(0, 48), slice(48, 90)):
        assert torch.allclose(got[:, part], model(ids[:, part]).logits, atol=2e-5)


@pytest.mark.parametrize("wrong", [5, math.nan])
def test_the_future_changes_nothing(wrong: float) -> None:
    spans, (q, k, v) = far_layer(), rotated(80, dtype=torch.float32)
    with torch.no_grad():
        before = attend_seen(q, k, v, Seen(80, None), spans, 0.0, 0.4, None)
        for x in (q, k, v):
            x[:, :, 60:] = wrong
        after = attend_seen(q, k, v, Seen(80, None), spans, 0.0, 0.4, None)
    # NaN sends the exact part another way through the kernel, so it may be rounded differently
    assert torch.allclose(before[:, :, :60], after[:, :, :60], rtol=0, atol=2e-6 if math.isnan(wrong) else 0)


# ---- the KV cache


@pytest.mark.parametrize("ramp", [1, RAMP])
@pytest.mark.parametrize("cuts", [[100], [1, 99], [33, 31, 36], [70] + [1] * 30])
def test_segments_are_decoding_are_one_pass(cuts: list[int], ramp: float) -> None:
    model, ids = far_model(ramp), tokens(2, 100)
    with torch.no_grad():
        whole = model(ids).logits
        cache, at, found = hf.SpanCache(model), 0, []
        for n in cuts:
            found.append(model(ids[:, at : at + n], past_key_values=cache, use_cache=True).logits)
            at += n
    assert torch.allclose(torch.cat(found, 1), whole, atol=3e-5)


def test_bytes_hold_rings_and_states() -> None:
    model, ids = far_model(1), tokens(2, 100)
    set_windows(model, torch.tensor([[5, 40], [17, 30], [9, 60]]))
    first = next(iter(hf.head_spans(model).values())).far
    assert first is not None
    first.on.copy_(torch.tensor([True, False]))
    cache = hf.SpanCache(model, context=100)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    states = 2 * 5 * 3 * (8 + 1) * 4
    assert state_bytes(model, batch=2) == states
    rings = 2 * (5 + 40 + 17 + 30 + 9 + 60 + 6 * SINKS) * 16 * 4
    assert cache.bytes() == rings + states == hf.cache_bytes(model, 100, batch=2)[0]


def test_generate_with_a_cache_equals_generate_without() -> None:
    model, ids = far_model(), tokens(2, 70)
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    cached = model.generate(ids, past_key_values=hf.SpanCache(model), **options)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **options))
    beams = {"num_beams": 3, "max_new_tokens": 12}
    cached = model.generate(ids, past_key_values=hf.SpanCache(model), **(options | beams))
    assert torch.equal(cached, model.generate(ids, use_cache=False, **(options | beams)))


def test_crop_takes_tokens_back_within_the_slack() -> None:
    model, ids = far_model(), tokens(2, 100)
    cache = hf.SpanCache(model, slack=9)
    with torch.no_grad():
        model(ids[:, :80], past_key_values=cache, use_cache=True)
        for at in range(80, 89):
            model((ids[:, at : at + 1] + 3) % 90 + 2, past_key_values=cache, use_cache=True)
        cache.crop(-9)
        again = model(ids[:, 80:], past_key_values=cache, use_cache=True).logits
        assert torch.allclose(again, model(ids).logits[:, 80:], atol=3e-5)
        with pytest.raises(ValueError, match="slack above 9"):
            cache.crop(-15)


@pytest.mark.parametrize(("bits", "share"), [(8, 0.05), (4, 0.5)])
def test_few_bits_keep_the_states_in_float32(bits: Bits, share: float) -> None:
    model, ids = far_model(1), tokens(1, 100)
    cache = hf.SpanCache(model, bits=bits)
    with torch.no_grad():
        model(ids[:, :90], past_key_values=cache, use_cache=True)
        got = model(ids[:, 90:], past_key_values=cache, use_cache=True).logits
        whole = model(ids).logits[:, 90:]
    assert cache.layers[0].far.s.dtype == torch.float32  # type: ignore[union-attr]
    assert 0 < (got - whole).abs().max() < share * whole.abs().max()


def test_changed_spans_are_refused_by_a_cache_with_states() -> None:
    model, ids = far_model(), tokens(1, 90)
    cache = hf.SpanCache(model)
    with torch.no_grad():
        model(ids[:, :80], past_key_values=cache, use_cache=True)
        set_windows(model, torch.full((3, 2), 9))
        with pytest.raises(ValueError, match=r"spans have changed since this cache.*make a new SpanCache"):
            model(ids[:, 80:], past_key_values=cache, use_cache=True)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"far_features": -1}, "far_features is -1; expected a number of features, at least 0"),
        ({"far_features": True}, "far_features is True; expected a number of features"),
        ({"far_features": 4, "per": "head"}, "far_features is 4 beside per='head'; linear states need per='kv_head'"),
    ],
)
def test_attach_refuses(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.attach(tiny("llama"), **options)


def test_dropout_and_sink_logits_are_refused() -> None:
    spans, parts = far_layer(), rotated(50, dtype=torch.float32)
    with pytest.raises(
        ValueError, match=r"attention dropout is 0.1; heads with linear states support none: set it to 0"
    ):
        attend_seen(*parts, Seen(50, None), spans, 0.1, 0.4, None)
    with pytest.raises(ValueError, match=r"learned sink logits \(s_aux\), which linear states do not support"):
        attend_seen(*parts, Seen(50, None), spans, 0.0, 0.4, torch.zeros(4))


def test_layers_with_a_window_of_their_own_have_no_state() -> None:
    model = hf.attach(tiny("gemma3"), far_features=4)
    assert [spans.far is None for spans in hf.head_spans(model).values()] == [True, False, True]
