"""Spans attached to models of several architectures: the same model at full span, the equation at any other."""

from __future__ import annotations

import pytest
import torch

from support.hf_models import CONFIGS, dense, tiny, tokens, visible

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface

from spanformer import hf


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_full_span_is_the_model_itself_and_detach_restores_it(name: str, padding: str) -> None:
    model, ids = tiny(name), tokens(3, 41)
    mask = torch.ones_like(ids)
    if padding != "none":
        mask[0, :7], mask[1, :1] = 0, 0
        mask = mask.flip(1) if padding == "right" else mask
    names, before = set(model.state_dict()), model.config._attn_implementation
    with torch.no_grad():
        own = model(ids, attention_mask=mask).logits
        hf.attach(model)
        got = model(ids, attention_mask=mask).logits
        assert (got - own)[mask.bool()].abs().max() < 1e-4
        assert hf.detach(model) is model
        assert torch.equal(model(ids, attention_mask=mask).logits[mask.bool()], own[mask.bool()])
    assert set(model.state_dict()) == names and model.config._attn_implementation == before
    assert not hasattr(model.config, "spanformer")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("per", ["kv_head", "head"])
def test_spans_are_the_equation(name: str, per: str) -> None:
    model, ids, reach = tiny(name), tokens(2, 63), 37
    hf.attach(model, max_span=reach, ramp=5, sink_tokens=3, per=per)
    pairs = {}
    torch.manual_seed(3)
    for n, spans in enumerate(hf.head_spans(model).values()):
        with torch.no_grad():
            spans.ratio.uniform_(0, 1.0)
        pairs[n] = visible(spans.span_tensor(), 5, 3, 63, spans.window, reach)
    got = model(ids).logits.detach()
    # without gradients the rule is kept between calls, and terms that hide nothing are left out
    for p in model.parameters():
        p.requires_grad_(False)
    assert torch.allclose(model(ids).logits, got, atol=1e-5)
    hf.detach(model)
    AttentionInterface.register("dense_oracle", dense(pairs))
    AttentionMaskInterface.register("dense_oracle", lambda **_: None)
    model.set_attn_implementation("dense_oracle")
    truth = model(ids).logits.detach()
    assert (got - truth).abs().max() < 2e-5 * truth.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("ratio", [1.0, 0.2])
def test_nobody_sees_the_future(name: str, ratio: float) -> None:
    model, ids = tiny(name), tokens(1, 29)
    hf.attach(model, max_span=40, init=ratio, ramp=6)
    other = ids.clone()
    other[0, 17:] = (other[0, 17:] + 5) % 90 + 2
    with torch.no_grad():
        a, b = model(ids).logits, model(other).logits
    assert torch.equal(a[:, :17], b[:, :17]) and not torch.allclose(a[:, 17:], b[:, 17:])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("sink_tokens", [0, 2])
def test_packed_texts_are_each_alone(name: str, sink_tokens: int) -> None:
    """Positions that begin again: every text as if it stood by itself, its own first tokens kept."""
    model, lengths = tiny(name), [23, 1, 18]
    hf.attach(model, max_span=30, init=0.2, ramp=3, sink_tokens=sink_tokens)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, use_cache=False).logits
        alone = [model(part).logits for part in ids.split(lengths, 1)]
    assert (packed - torch.cat(alone, 1)).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_padded_row_is_the_row_alone(name: str) -> None:
    """Spans and sink_tokens count from a row's first token, wherever its padding stands."""
    model, ids = tiny(name), tokens(2, 31)
    hf.attach(model, max_span=30, init=0.1, ramp=4, sink_tokens=3)
    short = ids[0, 9:]
    with torch.no_grad():
        alone = model(short[None]).logits[0]
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        left = model(ids, attention_mask=mask, position_ids=positions).logits[0, 9:]
        right = model(ids.roll(-9, 1), attention_mask=mask.flip(1)).logits[0, :22]
    assert (left - alone).abs().max() < 2e-5 and (right - alone).abs().max() < 2e-5


def test_bfloat16() -> None:
    model, ids = tiny("llama").bfloat16(), tokens(2, 33)
    with torch.no_grad():
        own = model(ids).logits
        exact = tiny("llama")(ids).logits
        hf.attach(model)
        got = model(ids).logits
    assert got.dtype == torch.bfloat16
    assert (got - exact).abs().max() < 2 * (own - exact).abs().max()
    assert model.model.layers[0].self_attn.spans.ratio.dtype == torch.float32


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast(name: str) -> None:
    """What Trainer's bf16=True is: weights in float32, products in bfloat16, queries and keys in either."""
    model, ids = tiny(name), tokens(2, 40)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        own = model(ids, use_cache=False).logits.float()
        hf.attach(model)
        full = model(ids, use_cache=False).logits.float()
    with torch.no_grad():
        exact = model(ids, use_cache=False).logits
    assert (full - exact).abs().max() < 1.5 * (own - exact).abs().max()
    hf.detach(model)
    hf.attach(model, max_span=64, init=0.1, ramp=4)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids, use_cache=False).loss.backward()
        for spans in hf.head_spans(model).values():
            assert spans.ratio.grad is not None and bool(spans.ratio.grad.isfinite().all())
        with torch.no_grad():
            whole, cache = model(ids, use_cache=False).logits, hf.SpanCache(model)
            parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 30), (30, 31), (31, 40))]
    assert (torch.cat(parts, 1) - whole).abs().max() < 0.1 * whole.abs().max()


def test_ratios_stay_float32_when_the_model_is_cast_later() -> None:
    """And what was read from them before a move is read again."""
    model = hf.attach(tiny("llama"), max_span=100, init=0.123, ramp=5)
    spans = next(iter(hf.head_spans(model).values()))
    model.requires_grad_(False)(tokens(1, 60))
    model.bfloat16()
    assert spans.ratio.dtype == torch.float32 and spans.ratio[0] == torch.tensor(0.123)
    assert model(tokens(1, 60)).logits.dtype == torch.bfloat16
    model.double()
    assert spans.ratio.dtype == spans.rule_for(60).span.dtype == torch.float64


def test_names_and_settings_are_stable() -> None:
    model = hf.attach(tiny("llama"), max_span=64, ramp=8, sink_tokens=2)
    assert "model.layers.2.self_attn.spans.ratio" in model.state_dict()
    assert model.config.spanformer == {"max_span": 64, "ramp": 8.0, "per": "kv_head", "sink_tokens": 2}
    assert [tuple(s.ratio.shape) for s in hf.head_spans(model).values()] == [(2,)] * 3
    assert list(hf.head_spans(model)) == [f"model.layers.{n}.self_attn" for n in range(3)]
    per_head = hf.attach(tiny("llama"), per="head")
    assert [tuple(s.ratio.shape) for s in hf.head_spans(per_head).values()] == [(4,)] * 3
    assert next(iter(hf.head_spans(per_head).values())).max_span == 128  # the model's own context


def test_what_a_cache_keeps() -> None:
    """z + R/2 + sink_tokens tokens a head, z = ratio · S + R/2; a window bounds it and has no sinks."""
    model = hf.attach(tiny("llama"), max_span=100, ramp=10, sink_tokens=4)
    layers = list(hf.head_spans(model).values())
    for s, ratios in zip(layers, ([0.0, 0.25], [0.405, 1.0], [0.95, 0.5]), strict=True):
        with torch.no_grad():
            s.ratio.copy_(torch.tensor(ratios))
    assert [s.keeps() for s in layers] == [[10, 35], [51, 100], [100, 60]]
    tokens_kept = sum(n + 4 for s in layers for n in s.keeps())
    per_token = 2 * 8 * 4  # a key and a value of 8 numbers in float32
    assert hf.cache_bytes(model, 1000) == (tokens_kept * per_token, 1000 * 6 * per_token)
    kept, full = hf.cache_bytes(model, 20, batch=3, dtype=torch.bfloat16)
    assert kept == 3 * (14 + 20 * 5) * per_token // 2 and full == 3 * 20 * 6 * per_token // 2
    mistral = hf.attach(tiny("mistral"), max_span=100, ramp=10)
    assert hf.cache_bytes(mistral, 1000)[0] == 3 * 2 * 9 * per_token
    grouped = hf.attach(tiny("llama"), max_span=100, ramp=10, per="head")
    spans = next(iter(hf.head_spans(grouped).values()))
    with torch.no_grad():
        spans.ratio.copy_(torch.tensor([0.125, 0.25, 0.5, 0.0]))
    assert spans.keeps() == [35, 60]  # a group keeps its longest


def test_spans_learn_and_are_clamped() -> None:
    model, ids = tiny("llama"), tokens(2, 60)
    hf.attach(model, max_span=64, init=0.3, ramp=8)
    layers = hf.head_spans(model).values()
    loss = model(ids, labels=ids).loss + hf.span_penalty(model, 1e-3)
    loss.backward()
    assert all(bool((s.ratio.grad != 0).all()) for s in layers)
    price = torch.autograd.grad(hf.span_penalty(model, 1e-3), [s.ratio for s in layers])
    assert all(torch.allclose(g, torch.full_like(g, 1e-3 * 64 / 2)) for g in price)
    with torch.no_grad():
        for s in layers:
            s.ratio.add_(torch.tensor([5.0, -5.0]))
    hf.clamp_spans(model)
    assert all(s.ratio.tolist() == [1.0, 0.0] for s in layers)


def test_gradients_of_spans_are_the_slope_of_the_loss() -> None:
    model, ids = tiny("llama").double(), tokens(1, 40)
    hf.attach(model, max_span=50, init=0.31, ramp=9, sink_tokens=2)
    ratio = model.model.layers[1].self_attn.spans.double().ratio

    def loss() -> torch.Tensor:  # in double, which transformers' own loss is not
        return torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])

    (grad,) = torch.autograd.grad(loss(), [ratio])
    step = 2e-3  # a tenth of a token; the model's norms are in float32 whatever its dtype, so not smaller
    slopes = []
    for n in range(2):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                ratio[n] += sign * step
                ends.append(float(loss()))
                ratio[n] -= sign * step
        slopes.append((ends[0] - ends[1]) / (2 * step))
    assert torch.allclose(grad, torch.tensor(slopes, dtype=torch.float64), rtol=0.02, atol=0)


def test_gradient_checkpointing_changes_nothing() -> None:
    ids, grads = tokens(2, 40), []
    for checkpointing in (False, True):
        model = hf.attach(tiny("llama"), max_span=64, init=0.3, ramp=8)
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
