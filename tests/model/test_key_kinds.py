"""The kinds of heads that live on keys, scores and sinks, from a configuration: trained a little, read by segments and
with a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.model.config import PositionConfig
from spanformer.model.lm import LM
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text, with_attention

KINDS = (
    "expire_span",
    "forgetting",
    "sink_window(9)",
    "sink_span",
    "dot",
    "general",
    "bilinear",
    "additive",
    "chunked",
)
MIXTURES = (
    "2 expire_span + 2 adaptive_span",
    "2 forgetting + 2 dynamic_span",
    "2 sink_window(7) + 2 adaptive_span",
)
SEGMENTS_ONLY = ("additive", "chunked")  # these have no cache


def config(kind: str):
    position = PositionConfig(kind="alibi" if kind == "additive" else "rotary")
    return with_attention(replace(SMALL, layers=2, kv_heads=2, position=position), stack=(kind,))


@pytest.mark.parametrize("kind", (*KINDS, *MIXTURES))
def test_segments_and_cache_equal_one_pass(kind: str) -> None:
    lm, x = make(config(kind)), text(2, 130)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, [70]), whole, rtol=1e-9, atol=1e-9)
    if kind in SEGMENTS_ONLY:
        with pytest.raises(ValueError, match="has no KV cache"):
            lm.cache(2)
        return
    torch.testing.assert_close(from_cache(lm, x, [90, 1, 1, 38]), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", (*KINDS, *MIXTURES))
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    torch.manual_seed(0)
    lm = LM(config(kind))
    x = text(2, 65)
    first = lm(x[:, :32], targets=x[:, 1:33])
    out = lm(x[:, 32:64], first.state, targets=x[:, 33:])
    (out.nll.mean() + out.penalty).backward()
    idle = [name for name, p in lm.named_parameters() if p.grad is None or not bool(p.grad.abs().sum() > 0)]
    assert not idle


def test_sink_tokens_as_a_parameter() -> None:
    lm = make(config("sink_window(9, 3)"))
    assert [mechanism.sink_tokens for mechanism in lm.mechanisms()] == [3, 3]
    x = text(2, 60)
    torch.testing.assert_close(from_cache(lm, x, [20, 20, 20]), lm(x).logits, rtol=1e-9, atol=1e-9)
