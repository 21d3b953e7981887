"""Sinkhorn attention: its equation in both directions, causality, reading by segments."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spanformer import LM, Encoder, ModelConfig
from spanformer.attention import View
from spanformer.attention.sinkhorn import Sinkhorn
from spanformer.kinds.sinkhorn import KIND
from spanformer.model.config import AttentionConfig, PositionConfig
from support.low_rank_oracle import pooled


def inputs(length: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    return [torch.randn(2, 2, length, 4, dtype=torch.float64, generator=g).requires_grad_() for _ in range(3)]


def run(m: Sinkhorn, q: Tensor, k: Tensor, v: Tensor, view: View | None = None) -> Tensor:
    view = view or View()
    return m(q, k, v, m.rule(view), view).out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 33])
def test_equation(length: int, causal: bool, padded: bool) -> None:
    m = Sinkhorn(2, 8, 25, iterations=3, causal=causal)
    padding = torch.zeros(2, length, dtype=torch.bool)
    if padded:
        padding[1, length // 3 : length // 3 + 9] = True
    leaves = inputs(length)
    toward = torch.randn(2, 2, length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    toward = toward.masked_fill(padding[:, None, :, None], 0)
    found, right = run(m, *leaves, View(padding=padding)), pooled(m, "sinkhorn", *leaves, padding)
    torch.testing.assert_close(found * (toward != 0), right * (toward != 0))
    grads = (torch.autograd.grad((out * toward).sum(), leaves, allow_unused=True) for out in (found, right))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


def test_rows_and_columns_are_balanced() -> None:
    """In a decoder the block before has the largest weight, and after many iterations all, whatever the scores."""
    torch.manual_seed(0)
    score, every = torch.randn(1, 2, 9, 9, dtype=torch.float64), torch.ones(1, 2, 9, 9, dtype=torch.bool)
    r = Sinkhorn(2, 8, iterations=60, causal=False).match(score, every)
    torch.testing.assert_close(r.sum(3), torch.ones(1, 2, 9, dtype=torch.float64))
    torch.testing.assert_close(r.sum(2), torch.ones(1, 2, 9, dtype=torch.float64))
    past = every.tril(-1)
    shares = []
    for iterations in (1, 60):
        r = Sinkhorn(2, 8, iterations=iterations).match(3 * score, past)
        before = r.diagonal(-1, 2, 3)
        assert not r[~past].any() and torch.equal(before, torch.ones_like(before)) and float(r.max()) <= 1
        shares.append(float((before / r.sum(3)[..., 1:]).min()))
    assert shares[0] < 0.8 and shares[1] > 0.9


def test_low_temperature_matches_one_block_each() -> None:
    torch.manual_seed(0)
    score, every = torch.randn(1, 1, 6, 6, dtype=torch.float64), torch.ones(1, 1, 6, 6, dtype=torch.bool)
    r = Sinkhorn(1, 8, iterations=400, temperature=0.02, causal=False).match(score, every)
    assert sorted(r[0, 0].argmax(1).tolist()) == list(range(6)) and float(r.amax(3).min()) > 0.9


@pytest.mark.parametrize("at", [1, 8, 17, 24, 33])
@pytest.mark.parametrize("future", [1e3, math.inf, math.nan])
@pytest.mark.parametrize("backend", ["native", "banded"])
def test_no_output_depends_on_later_tokens(at: int, backend: str, future: float) -> None:
    """Not by NaN: a match of weight 0 times NaN is NaN."""
    m = Sinkhorn(2, 8, 32)
    m.backend = backend
    q, k, v = (t.detach().float() for t in inputs(70))
    before = run(m, q, k, v)[:, :, :at].clone()
    for t in (q, k, v):
        t[:, :, at:] = future * torch.randn(t[:, :, at:].shape)
    after = run(m, q, k, v)[:, :, :at]
    # The kernel may round differently beside numbers that are not finite.
    assert torch.equal(after, before) if future == 1e3 else (after - before).abs().max() < 1e-6


def test_noise_is_of_training_alone() -> None:
    m = Sinkhorn(2, 8, noise=1.0)
    q, k, v = (t.detach() for t in inputs(40))
    assert not torch.equal(run(m, q, k, v), run(m, q, k, v))
    m.eval()
    assert torch.equal(run(m, q, k, v), run(m, q, k, v))


def model(attention: str, position: str = "rotary", **changes) -> ModelConfig:
    return replace(
        ModelConfig(
            vocab=11, dim=32, layers=2, heads=4, position=PositionConfig(kind=position, length=128),
            attention=AttentionConfig(kind=attention, max_span=40),
        ), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("cuts", [[1, 2, 3], [64], [33, 50, 51, 97], [40, 80]])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_segments_equal_one_pass(cuts: list[int], kv_heads: int) -> None:
    torch.manual_seed(0)
    lm = LM(model("sinkhorn(7)", kv_heads=kv_heads)).double()
    x = torch.randint(11, (2, 130), generator=torch.Generator().manual_seed(1))
    parts, state = [], None
    for piece in x.tensor_split(cuts, 1):
        found = lm(piece, state)
        parts.append(found.logits)
        state = found.state
    torch.testing.assert_close(torch.cat(parts, 1), lm(x).logits)


def test_encoder_reads_both_ways_and_leaves_padding_out() -> None:
    torch.manual_seed(0)
    encoder = Encoder(model("sinkhorn(7)", "sinusoidal", kind="encoder", kv_heads=2)).double().eval()
    x = torch.randint(11, (2, 30))
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[:, 23:] = True
    before = encoder(x, padding=padding)
    other = x.clone()
    other[:, 23:] = 3
    torch.testing.assert_close(states(encoder(other, padding=padding))[:, :23], states(before)[:, :23])
    other[:, 22] = (other[:, 22] + 1) % 11
    assert bool((states(encoder(other, padding=padding)) - states(before))[:, 0].any())


def states(found) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 17, 24, 40, 100])
def test_cost_counts_the_pairs(n: int) -> None:
    p = SimpleNamespace(size=8, max_span=26)
    counted = sum(i % 8 + 1 + 8 * (i % 24 >= 8) for i in range(n))
    assert KIND.cost.pairs is not None and KIND.cost.pairs(n, True, p) == counted
    both = sum(min(n, i // 8 * 8 + 8) - i // 8 * 8 + min(n, 8) for i in range(n))
    assert KIND.cost.pairs(n, False, p) == both


def test_bad_input_is_one_sentence() -> None:
    lm = LM(model("sinkhorn(7)"))
    with pytest.raises(ValueError, match=r"Sinkhorn has no KV cache: .* Score the text by segments instead"):
        lm.cache(1)
    with pytest.raises(ValueError, match=r"Sinkhorn cannot share a layer with other kinds"):
        LM(model("2 sinkhorn(7) + 2 window(8)"))
    with pytest.raises(ValueError, match=r"size is 41 and max_span 40; expected a block within max_span"):
        LM(model("sinkhorn(41)"))
    with pytest.raises(ValueError, match=r"temperature is 0.* expected above 0, and 0 or more"):
        LM(model("sinkhorn(7, temperature=0)"))
    with pytest.raises(ValueError, match=r"Alibi depends on distances, and a matched key is of several blocks"):
        LM(model("sinkhorn(7)", "alibi"))(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"documents was given; a matched key is of several blocks"):
        lm(torch.zeros(1, 9, dtype=torch.int64), documents=torch.zeros(1, 9, dtype=torch.int64))
