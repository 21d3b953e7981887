"""Spans attached to models of several architectures: the same model at full span, the equation at any other."""

from __future__ import annotations

import pytest
import torch

from hf_models import CONFIGS, dense, tiny, tokens, visible

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
    hf.attach(model, max_span=reach, ramp=5, sinks=3, per=per)
    pairs = {}
    torch.manual_seed(3)
    for n, spans in enumerate(hf.head_spans(model).values()):
        with torch.no_grad():
            spans.ratio.uniform_(0, 1.0)
        pairs[n] = visible(spans.spans(), 5, 3, 63, spans.window, reach)
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
