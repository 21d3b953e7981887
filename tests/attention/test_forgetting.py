"""Forgetting attention against its equation, alone and in a language model: whole, by segments, with a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer.attention import AdaptiveSpan, Attention, Forgetting, Mixed, Sinks, View
from spanformer.model.lm import LM
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text

F64 = torch.float64
DIM, H, D = 12, 3, 4


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def forgetting(heads: int = H, dim: int = DIM, max_span: int = 1000) -> Forgetting:
    made = Forgetting(dim, heads, max_span, init=1.0).double()
    with torch.no_grad():
        made.weight.copy_(rand(heads, dim, seed=5) / 3)
    return made


def by_loops(mechanism: Forgetting, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, every sum of log gates written out."""
    (b, h, tq, d), tk = q.shape, k.shape[2]
    gates = torch.sigmoid(keys @ mechanism.weight.T + mechanism.bias)  # [B, Tk, H]
    score = q @ k.transpose(-1, -2) / d**0.5
    rows = []
    for i in range(tk - tq, tk):
        sums = [gates[:, j + 1 : i + 1].log().sum(1) for j in range(i + 1)]  # [B, H] each
        hidden = torch.full((b, h, tk - i - 1), -torch.inf, dtype=F64)
        rows.append(torch.cat([torch.stack(sums, -1), hidden], -1))
    score = score + torch.stack(rows, 2)
    return score.softmax(-1) @ v, score.logsumexp(-1)


@pytest.mark.parametrize("sizes", [(1, 1), (17, 17), (40, 63)])
def test_equation_and_gradients(sizes) -> None:
    tq, tk = sizes
    mechanism, keys = forgetting(), rand(2, tk, DIM, seed=7).requires_grad_()
    q, k, v = (rand(2, H, n, D, seed=s).requires_grad_() for s, n in ((1, tq), (2, tk), (3, tk)))
    view = View(x=keys[:, tk - tq :], keys=keys)
    weights = rand(2, H, tq, D, seed=4), rand(2, H, tq, seed=6)
    got, true = mechanism(q, k, v, mechanism.rule(view), view), by_loops(mechanism, q, k, v, keys)
    wrt = [q, k, v, keys, mechanism.weight, mechanism.bias]
    grads = []
    for found in (got, true):
        torch.testing.assert_close(found[0], true[0])
        torch.testing.assert_close(found[1], true[1])
        grads.append(torch.autograd.grad(sum((x * w).sum() for x, w in zip(found, weights, strict=True)), wrt))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_future_tokens_and_their_gates_have_no_effect() -> None:
    mechanism, x = forgetting(), rand(2, 50, DIM)
    q, k = rand(2, H, 50, D), rand(2, H, 50, D, seed=1)
    before = mechanism(q, k, k, mechanism.rule(View(x=x)), View()).out
    x[:, 30:] += 3
    k[:, :, 30:] += 3
    after = mechanism(q, k, k, mechanism.rule(View(x=x)), View()).out
    torch.testing.assert_close(before[:, :, :30], after[:, :, :30], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[:, :, 31:], after[:, :, 31:])


def test_long_text_in_float32() -> None:
    """What is forgotten adds up to thousands; near the end, float32 is as good as float64."""
    mechanism = Forgetting(DIM, 2, 5000).float()
    x = torch.randn(1, 4000, DIM, generator=torch.Generator().manual_seed(0))
    q = torch.randn(1, 2, 4000, D, generator=torch.Generator().manual_seed(1))
    mechanism.eval()
    with torch.no_grad():
        rule = mechanism.rule(View(x=x))
        assert rule.forget is not None and float(rule.forget.min()) < -2000
        got = mechanism(q, q, q, rule, View()).out
        true = mechanism(q.double(), q.double(), q.double(), rule, View()).out
    assert float((got - true)[:, :, -500:].abs().max()) < 2e-4
    assert float((got - true).abs().max()) < 2e-3


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"view.keys is missing"):
        forgetting().rule(View())
    with pytest.raises(ValueError, match="dim is 12, heads 0 and max_span 5; expected at least 1 each"):
        Forgetting(12, 0, 5)


def model(mechanism, **options) -> LM:
    lm = make(replace(SMALL, **options))
    for block in lm.blocks:
        block.attention.mechanism = mechanism()
    return lm.double()


def alone() -> Attention:
    return forgetting(4, SMALL.dim, 60)


def mixed() -> Attention:
    return Mixed([Sinks(forgetting(2, SMALL.dim, 90)), AdaptiveSpan(2, 64, ramp=5, init=0.3)])


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [(alone, {"kv_heads": 2}), (alone, {"persistent": 5}), (mixed, {"kv_heads": 2}), (mixed, {"persistent": 5})],
)
def test_segments_and_cache_equal_one_pass(mechanism, options) -> None:
    lm, x = model(mechanism, **options), text(2, 150)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, range(37, 150, 37)), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(from_cache(lm, x, [70, *[1] * 30, 50]), whole, rtol=1e-9, atol=1e-9)
