"""Hard attention: the best key against a dense oracle, its surrogate gradients, and that drawing keys is unbiased."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import Choices, Cross, Hard, View, Window
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.report.events import read_run
from spanformer.train.run import train
from support.largest import largest_tensor
from support.tiny_runs import tiny


def run(m: Hard, q: Tensor, k: Tensor, v: Tensor, view: View | None = None):
    view = view or View()
    return m(q, k, v, m.rule(view), view)


def inputs(t: int, dtype: torch.dtype = torch.float64, kv_heads: int = 4, rows: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(t)
    sizes = [(rows, 4, t, 8), (rows, kv_heads, t, 8), (rows, kv_heads, t, 5)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in sizes]


def weights(q: Tensor, k: Tensor, window: int, causal: bool) -> Tensor:
    """The softmax that a choice is made by, [B, H, T, T]."""
    d = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    seen = (d.abs() < window) & ((d >= 0) | (not causal))
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) / math.sqrt(q.shape[3])
    return torch.where(seen, s, -math.inf).softmax(-1)


def one_hot(p: Tensor) -> Tensor:
    return torch.zeros_like(p).scatter(-1, p.argmax(-1, keepdim=True), 1.0)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal, window", [(True, 200), (True, 20), (False, 200), (False, 20)])
@pytest.mark.parametrize("t", [1, 31, 64, 65, 101])
def test_equals_the_best_key_and_the_surrogate(t: int, causal: bool, window: int, kv_heads: int) -> None:
    """Values, and every gradient of Σ (e + p − sg(p)) v."""
    m = Hard(Window(4, window, causal=causal))
    q, k, v = inputs(t, kv_heads=kv_heads)
    p = weights(q, k, window, causal)
    values = v.repeat_interleave(4 // kv_heads, 1)
    true, found = (one_hot(p) + p - p.detach()) @ values, run(m, q, k, v).out
    torch.testing.assert_close(found, true, rtol=0, atol=1e-15)
    toward = torch.randn_like(true)
    grads = [torch.autograd.grad((each * toward).sum(), [q, k, v]) for each in (found, true)]
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_float32_chooses_as_float64_where_scores_differ() -> None:
    q, k, v = inputs(101)
    m = Hard(Window(4, 200))
    found = run(m, *(t.float() for t in (q, k, v))).out
    p = weights(q, k, 200, True)
    first, second = p.topk(2, -1).values.unbind(-1)
    clear = (first - second > 1e-5 * first).unsqueeze(-1)  # beyond what rounding of a product of 8 numbers can turn
    error = ((found - one_hot(p) @ v) * clear).abs().max()
    assert clear.double().mean() > 0.99 and error < torch.finfo(torch.float32).eps * v.abs().max()


def test_of_equal_scores_the_later_key_is_taken() -> None:
    q, k, v = (t.detach() for t in inputs(40))
    q, k = q.round(), k[:, :, :1].round().expand(k.shape)  # whole numbers, so that no sum rounds
    found = run(Hard(Window(4, 200)), q, k, v)
    torch.testing.assert_close(found.out, v)
    at = torch.randperm(40)  # keys in another order, as in a ring
    view = View(q_positions=torch.arange(40), k_positions=at)
    torch.testing.assert_close(run(Hard(Window(4, 200)), q, k[:, :, at], v[:, :, at], view).out, v)


def test_lse_is_the_score_of_the_chosen_key() -> None:
    q, k, v = inputs(33)
    s = q @ k.transpose(2, 3) / math.sqrt(8)
    best = s.masked_fill(torch.ones(33, 33).triu(1).bool(), -math.inf).amax(-1)
    torch.testing.assert_close(run(Hard(Window(4, 200)), q, k, v).lse, best)


def test_cross_attention_leaves_padding_out_and_sees_nothing_without_keys() -> None:
    q, k, v = inputs(30)
    padding = torch.arange(30) >= torch.tensor([20, 0])[:, None]
    m = Hard.wrap(Cross(4), 8)
    found = m(q, k, v, m.rule(View()), View(padding=padding)).out
    s = (q @ k.transpose(2, 3))[:1, ..., :20] / math.sqrt(8)
    p = s.softmax(-1)
    torch.testing.assert_close(found[:1], (one_hot(p) + p - p.detach()) @ v[:1, :, :20])
    assert not found[1].any()
    found.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v) if t.grad is not None)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rest", [1.0, torch.nan])
def test_earlier_outputs_do_not_depend_on_later_tokens(rest: float, sampled: bool) -> None:
    m = Hard(Window(4, 50), sampled=sampled).train()
    q, k, v = (t.detach() for t in inputs(150))
    outs = []
    for change in (False, True):
        q, k, v = (t.clone() for t in (q, k, v))
        if change:
            for t in (q, k, v):
                t[:, :, 128:] = rest * torch.randn_like(t[:, :, 128:])
        torch.manual_seed(3)
        with torch.no_grad():
            outs.append(run(m, q, k, v).out[:, :, :128])
    assert torch.equal(*outs)


def test_nan_query_touches_its_own_row_alone() -> None:
    q, k, v = (t.detach() for t in inputs(80))
    q[0, 1, 20] = torch.nan
    for training in (False, True):
        found = run(Hard(Window(4, 50)).train(training), q.clone().requires_grad_(), k, v).out
        assert found.isnan().any(-1).nonzero().tolist() == [[0, 1, 20]]


def test_nothing_of_the_square_of_the_text_is_built() -> None:
    m, (q, k, v) = Hard(Window(4, 4000)), inputs(1000, torch.float32, rows=1)
    assert largest_tensor(lambda: run(m, q, k, v).out.sum().backward()) <= 4 * 64 * 1000 < 1000 * 1000


# ---- drawn keys


def test_keys_are_drawn_by_their_weights_and_the_best_in_evaluation() -> None:
    n = 4000
    q, k = (t.detach()[:1].expand(n, -1, -1, -1) for t in inputs(7)[:2])
    m, p = Hard(Window(4, 50), sampled=True), weights(q[:1], k[:1], 50, True)[0]
    eye = torch.eye(7, dtype=torch.float64).expand(n, 4, -1, -1)
    torch.manual_seed(0)
    share = run(m.train(), q, k, eye).out.mean(0)
    assert ((share - p).abs() <= 4 * (p * (1 - p) / n).sqrt() + 1e-12).all()
    assert torch.equal(run(m.eval(), q, k, eye).out[0], one_hot(p))


def test_score_function_gradient_is_unbiased() -> None:
    """Two queries, of which the second's loss depends on both choices, so that the reward to come counts. The expected
    gradient is that of the loss's mean over all choices; the estimate is within 3 standard errors of it."""
    n, g = 20_000, torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.tensor([[[[1.0], [-2.0]]]], dtype=torch.float64)
    leaf = q.clone().requires_grad_()
    p = weights(leaf, k, 9, False)[0, 0]  # [2, 2]
    losses = torch.tensor([1.0, -2.0], dtype=torch.float64)
    mean = sum(p[0, a] * (losses[a] + 3) + p[0, a] * p[1, b] * losses[a] * losses[b] for a in (0, 1) for b in (0, 1))
    # the first query's loss, once for both choices of the second
    mean = mean - sum(p[0, a] * (losses[a] + 3) for a in (0, 1))
    assert isinstance(mean, Tensor)
    (true,) = torch.autograd.grad(mean, leaf)

    m = Hard(Cross(1), sampled=True).double().train()
    m.baseline.copy_(torch.tensor([1.7, 0.9]))
    rows = q.expand(n, -1, -1, -1).clone().requires_grad_()
    torch.manual_seed(2)
    out = run(m, rows, k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1)).out[:, 0, :, 0]
    nll = torch.stack([out[:, 0] + 3, out[:, 0] * out[:, 1]], 1)
    m.learn_from(nll, torch.full_like(nll, 1.0))
    (each,) = torch.autograd.grad(nll.sum(), rows)
    error = each.std(0) / math.sqrt(n)
    assert ((each.mean(0) - true[0]).abs() <= 3 * error).all()
    assert error.max() < 0.1 * true.abs().max()  # so that a wrong one would be seen


def test_choices_are_reported_as_they_are() -> None:
    m = Hard(Window(4, 50), sampled=True).double().train()
    m.baseline.copy_(torch.tensor([2.0, 1.0]))
    q, k = inputs(11)[:2]
    assert m.choices() is None
    eye = torch.eye(11, dtype=torch.float64).expand(2, 4, -1, -1)
    drawn = run(m, q, k, eye).out
    p, nll = weights(q, k, 50, True), torch.rand(2, 11, dtype=torch.float64)
    m.learn_from(nll, torch.full_like(nll, 0.1))
    advantage = torch.stack([(0.1 * (nll[:, t:] - 2)).sum(1) for t in range(11)], 1)
    entropy = -(p * p.clamp(min=1e-300).log2()).sum(-1).mean()
    variance = (advantage[:, None, :, None] * (drawn - p)).square().sum((1, 3)).mean()
    found = m.choices()
    assert isinstance(found, Choices)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), torch.stack([entropy, variance]).detach())
    torch.testing.assert_close(m.baseline, torch.tensor([2 + 0.1 * (float(nll.mean()) - 2), 1.0]).double())


def small(kind: str, **model) -> LM:
    torch.manual_seed(0)
    return LM(ModelConfig(vocab=13, dim=24, layers=2, heads=4, position=PositionConfig(kind="rotary"),
                          attention=AttentionConfig(kind=kind, max_span=16), **model)).double().train()  # fmt: skip


def test_loss_must_be_told_before_the_backward_pass() -> None:
    lm, x = small("hard_sampled"), torch.randint(13, (2, 9))
    nll = lm(x, targets=x).nll
    assert nll is not None
    with pytest.raises(ValueError, match=r"call model\.learn_from\(nll, weight\) before the backward pass"):
        nll.mean().backward()


@pytest.mark.parametrize("how", ["checkpointing", "reversible"])
@pytest.mark.parametrize("kind", ["hard", "hard_sampled"])
def test_recomputed_layers_choose_the_same_keys(kind: str, how: str) -> None:
    x, found = torch.randint(13, (3, 21), generator=torch.Generator().manual_seed(1)), []
    lm = small(kind, stack="reversible" if how == "reversible" else "plain")
    if how == "reversible":  # a second pass within the backward pass must give what the first did
        torch.manual_seed(5)
        first = lm(x, targets=x).nll
        assert first is not None
        lm.learn_from(first, torch.full_like(first, 1 / first.numel()))
        first.mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in lm.blocks.parameters())
        return
    for again in (False, True):
        lm.checkpointing = again
        lm.zero_grad()
        for part in lm.modules():
            if isinstance(part, Hard) and part.sampled:
                part.baseline.zero_()
        torch.manual_seed(5)
        nll = lm(x, targets=x).nll
        assert nll is not None
        lm.learn_from(nll, torch.full_like(nll, 1 / nll.numel()))
        nll.mean().backward()
        found.append({name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None})
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind, drawn", [("hard", False), ("1 window(8) + 1 hard_sampled", True)])
def test_a_run_logs_entropy_and_variance(tmp_path: Path, kind: str, drawn: bool) -> None:
    train(tiny(tmp_path, {"model.attention.kind": kind, "train.steps": 3}))
    last = read_run(tmp_path / "run").steps[-1]
    assert 0 < last.choice_entropy < 5
    assert (last.choice_variance > 0) == drawn


def test_refusals() -> None:
    m = Hard(Window(4, 8))
    m.dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout is 0\.1, and hard attention has no weights to drop; set it to 0"):
        run(m.train(), *inputs(5))
    with pytest.raises(ValueError, match=r"sees one key, so it shares no softmax with persistent vectors"):
        small("hard", persistent=3)
    with pytest.raises(ValueError, match=r"max_span in .* is 0; expected at least 1"):
        small("hard(0)")
