"""Decays of retention as spans, fixed and learned; gates of random feature attention."""

from __future__ import annotations

import pytest
import torch

from spanformer import LM
from spanformer.attention import RFA, GatedRFA, Retention, View
from spanformer.model.config import AttentionConfig, ModelConfig


def test_spans_are_those_of_the_paper() -> None:
    m = Retention(4, 8)
    decay = m.key_features({"k": torch.zeros(1, 4, 1, 8)}, {}, None, None).decay
    assert decay is not None
    torch.testing.assert_close(decay[0, :, 0].exp(), 1 - 2.0 ** -(5 + torch.arange(4.0)))
    assert m.spans() == [32.0, 64.0, 128.0, 256.0]
    assert Retention(4, 8, kv_heads=2).spans() == [32.0, 32.0, 64.0, 64.0]


def test_decay_of_many_heads_stays_below_one() -> None:
    decay = Retention(40, 8).key_features({"k": torch.zeros(1, 40, 1, 8)}, {}, None, None).decay
    assert decay is not None and bool((decay < 0).all())


def test_learned_decay_is_put_back_into_its_range() -> None:
    m = Retention(3, 8, learned=True)
    with torch.no_grad():
        m.log_span.copy_(torch.tensor([-4.0, 7.0, 50.0]))
    m.after_step()
    assert m.spans() == [2.0, 128.0, 2.0**20]
    assert not list(Retention(3, 8).parameters())


def test_learned_decay_follows_what_pays() -> None:
    """Values of the token just before are to be copied, so that a long memory only blurs."""
    torch.manual_seed(0)
    m, v = Retention(1, 4, learned=True), torch.randn(8, 1, 30, 4)
    q = k = torch.ones(8, 1, 30, 4)
    optimizer = torch.optim.SGD([m.log_span], lr=5.0)
    for _ in range(20):
        loss = (m(q, k, v, m.rule(), View()).out - torch.nn.functional.rms_norm(v, [4])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        m.after_step()
    (span,) = m.spans()
    assert span is not None and span < 16


def test_gates_of_minus_fifty_forget_and_give_no_nan() -> None:
    torch.manual_seed(0)
    m = GatedRFA(16, 2, 8)
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    for bias in (-50.0, 50.0):
        with torch.no_grad():
            m.bias.fill_(bias)
        found = m(q, k, v, m.rule(), View(x=torch.randn(1, 70, 16)))
        grads = torch.autograd.grad(found.out.sum(), [q, k, v, m.weight, m.bias])
        assert bool(found.out.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads)
        if bias < 0:  # nothing of the past is left: each token's own value
            own = (m._features(q) * m._features(k)).sum(3)
            torch.testing.assert_close(found.out[own > 1e-2], v[own > 1e-2], rtol=1e-4, atol=1e-5)


def test_mean_estimate_is_the_gaussian_kernel() -> None:
    """Of unit vectors, over 1,000 draws, within 3 standard errors."""
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 1, 1, 8, dtype=torch.float64), dim=-1)
    found = []
    for _ in range(1000):
        m = RFA(1, 8, 4).double()
        found.append((m._features(q) * m._features(k)).sum())
    each = torch.stack(found).detach()
    wanted = torch.exp(-(q - k).square().sum() / 2)
    assert abs(each.mean() - wanted) <= 3 * each.std() / 1000**0.5 + 2e-3  # 10⁻³ are added to lengths


def test_persistent_vectors_are_refused() -> None:
    config = ModelConfig(vocab=9, dim=16, layers=1, heads=2, persistent=2, attention=AttentionConfig(kind="retention"))
    with pytest.raises(ValueError, match=r"model\.persistent is set, and Retention has no sum of weights"):
        LM(config)
