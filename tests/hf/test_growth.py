"""Spans that grow with the text, w(n) = w(S) + b·(max(n, S/2) − S), and unlimited heads (b = 1)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spanformer import hf
from spanformer.hf.fit import FitConfig, growth_table, learn, set_windows, window_slopes, window_table
from spanformer.hf.survey import survey
from spanformer.hf.text import TextChunks
from spanformer.hf.window_learner import grow_within
from spanformer.model.budget import Budget, allocate
from support.hf_models import dense, tiny, tokens, transformers

S, RAMP, SINKS = 40, 3.0, 2
GROWTH = torch.tensor([[0.0, 1.0], [0.3, 0.9], [0.5, 0.0]])


def grown(name: str = "llama", growth: Tensor = GROWTH, per: str = "kv_head"):
    model = hf.attach(tiny(name), max_span=S, ramp=RAMP, sink_tokens=SINKS, per=per)
    torch.manual_seed(3)
    with torch.no_grad():
        for spans, row in zip(hf.head_spans(model).values(), growth, strict=True):
            spans.ratio.uniform_(0.1, 0.6)
            spans.growth.copy_(row.repeat_interleave(len(spans.growth) // len(row)))
    return model


def seen(model, length: int) -> Tensor:
    """[L, H, T, T] the weight of each pair, from the equation."""
    i = torch.arange(length)
    d = (i[:, None] - i)[None].double()
    found = []
    for spans in hf.head_spans(model).values():
        group = spans.heads // spans.kv_heads
        z, b = (t.detach().double().repeat_interleave(group)[:, None] for t in (spans.ratio, spans.growth))
        z = (z * S + b * ((i + 1).clamp(min=S // 2) - S)).clamp(min=0)[..., None]
        m = ((z + RAMP - d) / RAMP).clamp(0, 1)
        m = torch.where((b[..., None] == 0) & (d >= S), 0, m)
        m = torch.where((b[..., None] == 1) | (i < SINKS), 1.0, m)
        found.append(torch.where(d >= 0, m, 0))
    return torch.stack(found)


@pytest.mark.parametrize("growth", [GROWTH, GROWTH.round(), torch.ones(3, 2)])
@pytest.mark.parametrize("per", ["kv_head", "head"])
def test_every_query_has_the_span_of_its_position(growth: Tensor, per: str) -> None:
    model, ids = grown(growth=growth, per=per), tokens(2, 100)
    with torch.no_grad():
        found = model(ids).logits
        transformers.AttentionInterface.register("dense_growth", dense(seen(model, 100)))
        plain = tiny("llama")
        plain.set_attn_implementation("dense_growth")
        want = plain(ids).logits
    assert (found - want).abs().max() < 2e-5 * want.abs().max()


def test_unlimited_heads_see_beyond_the_fit() -> None:
    model, ids = grown(growth=torch.ones(3, 2)), tokens(1, 120)
    with torch.no_grad():
        assert (model(ids).logits - tiny("llama")(ids).logits).abs().max() < 2e-5


@pytest.mark.parametrize("options", [{}, {"slack": 8}, {"context": 100}])
def test_text_read_in_pieces_is_the_text_read_at_once(options: dict) -> None:
    model, ids = grown(), tokens(2, 100)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, parts, at = hf.SpanCache(model, **options), [], 0
        for n in (17, 1, 1, 9, 1, 40, 1, 1, 12, 17):
            parts.append(model(ids[:, at : at + n], past_key_values=cache).logits)
            at += n
    assert (torch.cat(parts, 1) - whole).abs().max() < 2e-5 * whole.abs().max()


def test_padded_rows_and_beams() -> None:
    model, ids = grown(), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "num_beams": 3, "pad_token_id": 0}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, past_key_values=hf.SpanCache(model), **options), want)
    with torch.no_grad():  # padding has no position: the row is the text without it
        alone = model(ids[1:, 13:]).logits
        assert (model(ids, attention_mask=mask).logits[1:, 13:] - alone).abs().max() < 1e-4


@pytest.mark.parametrize("length", [12, S, 77, 300])
def test_bytes_equal_a_hand_count_and_the_cache_s_own(length: int) -> None:
    model = grown()
    kept = 0
    for spans in hf.head_spans(model).values():
        for rho, b in zip(spans.ratio.tolist(), spans.growth.tolist(), strict=True):
            span = max(0.0, rho * S + b * (max(length, S // 2) - S)) + RAMP
            kept += length if b == 1 else min(length, SINKS + min(-(-span // 1), 1 << 40 if b else S))
    assert hf.cache_bytes(model, length) == (kept * 2 * 8 * 4, 6 * length * 2 * 8 * 4)
    if length <= 100:
        cache = hf.SpanCache(model, context=length)
        with torch.no_grad():
            model(tokens(1, length), past_key_values=cache)
        assert cache.bytes() == kept * 2 * 8 * 4 + 6 * max(0, SINKS - length) * 64


def test_slopes_are_the_derivatives() -> None:
    model, ids = grown().double(), tokens(1, 90)[0]
    layers = list(hf.head_spans(model).values())
    growth = torch.full((3, 2), 0.4)
    windows = torch.tensor([[11.3, 20.3], [15.3, 9.3], [25.3, 13.3]])  # no edge is at a whole distance
    set_windows(model, torch.full((3, 2), S))
    with torch.no_grad():
        wanted = model.base_model(input_ids=ids[None]).last_hidden_state[0, 44:-1]

    def loss(windows: Tensor, growth: Tensor) -> tuple[float, Tensor, Tensor]:
        set_windows(model, windows, ramp=8.0, growth=growth)
        return window_slopes(model, layers, ids, wanted, 45, grow=True)

    _, by_window, by_growth = loss(windows, growth)
    assert not any(layer.growth.requires_grad for layer in layers)
    for at in ((0, 0), (1, 1), (2, 0)):
        for found, which, step in ((by_window, 0, 0.05), (by_growth, 1, 0.0005)):
            sides = []
            for sign in (1, -1):
                moved = [windows.clone(), growth.clone()]
                moved[which][at] += sign * step
                sides.append(loss(*moved)[0])
            assert float(found[at]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=0.05, abs=1e-5)


def test_growths_share_the_memory_at_every_length() -> None:
    torch.manual_seed(0)
    windows = torch.randint(3, 80, (3, 2)).float()
    windows[1, 1] = 94  # all
    growth = torch.tensor([[0.0, 0.2], [0.01, 1.0], [0.6, 0.3]])
    for share in (0.1, 0.4, 0.7):
        served = Budget(share, 1000, SINKS)
        found = grow_within(windows, growth, Budget(share, 96, SINKS), served)
        kept = (windows + found.double() * (1000 - 96)).ceil() + SINKS
        assert kept.mean() <= share * 1000 + 1e-6
        assert kept.mean() > share * 1000 - 2 or float(found.max()) > 0.999
        assert found[0, 0] == 0 and float(found.max()) <= 1
        assert found[1, 1] == (1 if share > 0.2 else found[1, 1])
    assert grow_within(windows, growth, Budget(0.1, 96, SINKS), Budget(0.1, 1000, SINKS))[1, 1] < 1  # no room for it


def test_a_fit_for_longer_texts_has_the_stated_share_at_every_length() -> None:
    model = hf.attach(tiny("llama"), max_span=96, sink_tokens=SINKS).requires_grad_(False)
    texts = TextChunks(tokens(3, 96), torch.full((3,), 144), 48)
    budget = Budget(0.4, 96, SINKS)
    found = survey(model, texts[:1], sink_tokens=SINKS)
    config = FitConfig(steps=3, check=2, ramp=12, last_ramp=4)
    served = Budget(0.4, 960, SINKS)
    windows = learn(
        model, texts[:2], texts[2:], budget, allocate(found.costs, found.grid, budget), config, served=served
    )
    assert torch.equal(window_table(model), windows)
    growth = growth_table(model)
    assert growth.min() >= 0 and growth.max() <= 1 and bool((growth > 0).any())
    for length in (96, 200, 500, 960):
        kept, full = hf.cache_bytes(model, length)
        assert kept / full <= 0.4 + 1 / length and (length != 960 or kept / full > 0.37)


def test_saved_and_loaded(tmp_path) -> None:
    model, ids = grown(), tokens(1, 100)
    model.save_pretrained(tmp_path / "model")
    hf.save_spans(model, tmp_path / "spans")
    for again in (hf.from_pretrained(tmp_path / "model").eval(), hf.load_spans(tiny("llama"), tmp_path / "spans")):
        assert torch.equal(growth_table(again), growth_table(model))
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)
    kept, full = hf.cache_bytes(model, 16 * S)
    assert f"| {16 * S} |" in (tmp_path / "spans" / "README.md").read_text() and kept / full > 0.3
    with torch.no_grad():
        next(iter(hf.head_spans(model).values())).growth[0] = 1.5
    hf.save_spans(model, tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"self_attn.spans.growth in .* expected \[2\] numbers from 0 to 1"):
        hf.load_spans(tiny("llama"), tmp_path / "wrong")


def test_where_spans_do_not_grow() -> None:
    for model in (hf.attach(tiny("llama"), max_span=S, far_features=2), hf.attach(tiny("mistral"), max_span=S)):
        with pytest.raises(ValueError, match="growth is given for a layer with linear states or with its own sliding"):
            set_windows(model, torch.full((3, 2), 5), growth=GROWTH)
    with pytest.raises(ValueError, match="unlimited; retrieval heads need fixed ones"):
        hf.retrieve(grown(), share=0.3, ring=4, k=2)
    with pytest.raises(ValueError, match="positions are missing; spans that grow with the text need"):
        next(itertools.islice(hf.head_spans(grown()).values(), 1, 2)).rule()
    with pytest.raises(ValueError, match="windows do not grow"):
        set_windows(hf.attach(tiny("gemma3"), max_span=S), torch.full((3, 2), 5), growth=GROWTH)
