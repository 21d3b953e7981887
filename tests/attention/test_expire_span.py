"""Expire-Span against its equations, alone and in a language model: whole, by segments, with a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import attend
from spanformer.attention import AdaptiveSpan, Attention, ExpireSpan, Mixed, View, Window
from spanformer.model.lm import LM
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text

F64 = torch.float64
DIM, H, D = 12, 3, 4


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def expiring(heads: int = H, dim: int = DIM, max_span: int = 40, **options) -> ExpireSpan:
    made = ExpireSpan(dim, heads, max_span, ramp=6, penalty=0.1, **options).double()
    with torch.no_grad():
        made.weight.copy_(rand(1, dim, seed=5))
        made.bias.fill_(-1.0)
    return made


def by_loops(mechanism: ExpireSpan, q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """out and the penalty: softmax, multiplied by m, renormalised, pair by pair of the definition."""
    r, (b, _, tq, d), tk = mechanism.ramp, q.shape, k.shape[2]
    e = mechanism.max_span * torch.sigmoid(keys @ mechanism.weight[0] + mechanism.bias)
    distance = torch.arange(tk - tq, tk)[:, None] - torch.arange(tk)
    m = ((r + e[:, None] - distance.abs()) / r).clamp(0, 1)  # [B, Tq, Tk]
    seen = (distance >= 0) if mechanism.causal else torch.ones(tq, tk, dtype=torch.bool)
    a = (q @ k.transpose(-1, -2) / d**0.5).masked_fill(~seen, -torch.inf).softmax(-1) * m[:, None]
    a = a / a.sum(-1, keepdim=True)
    ramp = (m > 0) & (m < 1) & seen
    penalty = 0.1 * (e[:, None] * ramp).sum() / (r * tq * b)
    return a @ v, penalty


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(1, 1), (17, 17), (63, 111), (111, 129)])
def test_equations_and_gradients(sizes, causal) -> None:
    tq, tk = sizes
    mechanism, keys = expiring(causal=causal), rand(2, tk, DIM, seed=7).requires_grad_()
    q, k, v = (rand(2, H, n, D, seed=s).requires_grad_() for s, n in ((1, tq), (2, tk), (3, tk)))
    weight = rand(2, H, tq, D, seed=4)
    view = View(x=keys[:, tk - tq :], keys=keys)
    rule = mechanism.rule(view)
    added = mechanism.penalty(rule, view)
    out = mechanism(q, k, v, rule, view).out
    true, penalty = by_loops(mechanism, q, k, v, keys)
    torch.testing.assert_close(out, true)
    torch.testing.assert_close(added, penalty)
    wrt = [q, k, v, keys, mechanism.weight, mechanism.bias]
    got = torch.autograd.grad((out * weight).sum() + added, wrt)
    for mine, theirs in zip(got, torch.autograd.grad((true * weight).sum() + penalty, wrt), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_future_tokens_and_their_spans_have_no_effect() -> None:
    mechanism, x = expiring(), rand(2, 50, DIM)
    q, k = rand(2, H, 50, D), rand(2, H, 50, D, seed=1)
    before = mechanism(q, k, k, mechanism.rule(View(x=x)), View()).out
    x[:, 30:] += 3
    k[:, :, 30:] += 3
    after = mechanism(q, k, k, mechanism.rule(View(x=x)), View()).out
    assert torch.equal(before[:, :, :30], after[:, :, :30])
    assert not torch.allclose(before[:, :, 31:], after[:, :, 31:])


def test_shortening_while_training_only() -> None:
    mechanism, view = expiring(shorten=True), View(x=rand(2, 30, DIM))
    torch.manual_seed(0)
    longest = [float(mechanism.rule(view).key_span.max().detach()) for _ in range(20)]
    full = float(mechanism.eval().rule(view).key_span.max().detach())
    assert max(longest) <= full and min(longest) < 0.5 * full and len(set(longest)) > 10


def test_spans_alive_and_context_length_after_a_pass() -> None:
    mechanism = expiring()
    assert mechanism.spans() == [None] * H and mechanism.alive() is None
    keys = rand(2, 40, DIM)
    rule = mechanism.rule(View(x=keys[:, 35:], keys=keys))
    assert rule.key_span is not None
    e = rule.key_span[:, 0].detach()
    assert mechanism.spans()[0] == pytest.approx(float(e.mean()), rel=1e-6)
    assert mechanism.alive() == pytest.approx(float((e + 6 > 39 - torch.arange(40)).sum(1).float().mean()))
    assert mechanism.context_length() == [45] * H


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"view.keys is missing"):
        expiring().rule(View())
    with pytest.raises(ValueError, match=r"view.keys has shape \[2, 5, 7\]; expected \[B, Tk, 12\]"):
        expiring().rule(View(x=rand(2, 5, 7)))
    with pytest.raises(ValueError, match="max_span is 0"):
        ExpireSpan(DIM, H, 0)
    q = torch.randn(1, 2, 5, 4)
    rule = ExpireSpan(4, 2, 8).rule(View(x=torch.randn(1, 5, 4)))
    with pytest.raises(ValueError, match=r"backend 'flex' cannot serve this call: .*flex does not support key_span"):
        attend(q, q, q, rule, backend="flex")


# --- in a language model


def model(kv_heads: int, mechanism) -> LM:
    lm = make(replace(SMALL, kv_heads=kv_heads))
    for n, block in enumerate(lm.blocks):
        torch.manual_seed(n)
        block.attention.mechanism = mechanism()
    return lm.double()


def alone() -> Attention:
    return expiring(4, SMALL.dim)


def mixed() -> Attention:
    return Mixed([expiring(1, SMALL.dim, 90), Window(1, 9), AdaptiveSpan(2, 64, ramp=5, init=0.3)])


@pytest.mark.parametrize("mechanism", [alone, mixed])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_segments_and_cache_equal_one_pass(kv_heads, mechanism) -> None:
    lm, x = model(kv_heads, mechanism), text(2, 211)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, range(37, 211, 37)), whole, rtol=1e-9, atol=1e-9)
    for sizes in ([211], [100, *[1] * 50, 61]):
        torch.testing.assert_close(from_cache(lm, x, sizes), whole, rtol=1e-9, atol=1e-9)


def test_cache_rows_at_different_positions_crop_and_save(tmp_path) -> None:
    lm, x = model(2, alone), text(2, 120)
    whole = lm(x).logits
    cache = lm.cache(2, slack=4)
    lm.decode(x[:, :100], cache, lengths=torch.tensor([100, 70]), logits="none")
    cache.crop(torch.tensor([97, 70]))
    cache.save(tmp_path / "cache")
    again = type(cache).load(tmp_path / "cache", lm)
    rest = torch.stack([x[0, 97:117], x[1, 70:90]])
    read = lm.decode(rest, again)
    assert read is not None
    for row, start in ((0, 97), (1, 70)):
        torch.testing.assert_close(read[row], whole[row, start : start + 20], rtol=1e-9, atol=1e-9)
