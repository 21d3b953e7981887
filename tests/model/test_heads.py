"""Heads of a layer, one by one: leave one out, and let two change places."""

from __future__ import annotations

import pytest
import torch

from spanformer.attention import AdaptiveSpan
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.heads import swap_heads, without_head
from spanformer.model.layer import SelfAttention
from spanformer.model.lm import LM


def model() -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(max_span=20, ramp=4, init=0.3)
    position = PositionConfig(kind="rotary")
    return LM(ModelConfig(vocab=31, dim=32, layers=2, heads=4, attention=attention, position=position)).double().eval()


def layer_of(lm: LM) -> SelfAttention:
    """The last one."""
    layer = lm.blocks[-1].attention
    assert isinstance(layer, SelfAttention)
    return layer


def set_spans(layer: SelfAttention, *ratios: float) -> None:
    assert isinstance(layer.mechanism, AdaptiveSpan)
    layer.mechanism.ratio.copy_(torch.tensor(ratios))


IDS = torch.arange(14).view(2, 7)


@torch.no_grad()
def test_head_left_out_is_a_head_without_values() -> None:
    lm, other = model(), model()
    before = lm(IDS).logits
    layer_of(other).value.weight[16:24] = 0
    with without_head(layer_of(lm), 2):
        torch.testing.assert_close(lm(IDS).logits, other(IDS).logits, rtol=0, atol=1e-12)
    assert torch.equal(lm(IDS).logits, before) and not torch.allclose(before, other(IDS).logits)


@torch.no_grad()
def test_swapped_heads_give_the_same_if_their_spans_are_equal() -> None:
    lm = model()
    before, layer = lm(IDS).logits, layer_of(lm)
    query = layer.query.weight.clone()
    swap_heads(layer, 0, 3)
    assert torch.equal(layer.query.weight, torch.cat([query[24:], query[8:24], query[:8]]))
    torch.testing.assert_close(lm(IDS).logits, before, rtol=0, atol=1e-12)
    set_spans(layer, 0.0, 0.3, 0.3, 1.0)
    assert not torch.allclose(lm(IDS).logits, before)


@torch.no_grad()
def test_swapped_heads_give_the_same_if_their_spans_are_swapped_too() -> None:
    lm = model()
    layer = layer_of(lm)
    set_spans(layer, 0.0, 0.3, 0.5, 1.0)
    before = lm(IDS).logits
    swap_heads(layer, 0, 3)
    set_spans(layer, 1.0, 0.3, 0.5, 0.0)
    torch.testing.assert_close(lm(IDS).logits, before, rtol=0, atol=1e-12)


def test_grouped_heads_are_refused() -> None:
    config = ModelConfig(vocab=31, dim=32, layers=1, heads=4, kv_heads=2, attention=AttentionConfig(max_span=20))
    with pytest.raises(ValueError, match="2 KV heads for 4 query heads"):
        swap_heads(layer_of(LM(config)), 0, 1)
