"""Attention over keys that an index chooses: the equation, the index's loss, and what a later token may change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanformer import LM, Rule, attend
from spanformer.attention import Indexed, View
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.ops import chosen, index
from spanformer.ops.dropout import keep
from support.largest import largest_tensor
from support.oracles import eight_bits, indexed

DIM = 24


def make(keys: int, max_span: int = 1000, **options) -> Indexed:
    torch.manual_seed(0)
    return Indexed(4, DIM, keys, max_span, ramp=4.0, index_heads=3, index_dim=6, **options).double()


def run(m: Indexed, q: Tensor, k: Tensor, v: Tensor, view: View):
    return m(q, k, v, m.rule(view), view)


def inputs(t: int, dtype: torch.dtype = torch.float64, kv_heads: int = 4, rows: int = 2) -> tuple[list[Tensor], View]:
    g = torch.Generator().manual_seed(t)
    sizes = [(rows, 4, t, 8), (rows, kv_heads, t, 8), (rows, kv_heads, t, 5), (rows, t, DIM)]
    *qkv, x = (torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in sizes)
    return [each.requires_grad_() for each in qkv], View(x=x)


def dense(m: Indexed, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    k, v = (t.repeat_interleave(4 // t.shape[1], 1) for t in (k, v))
    s = q @ k.transpose(2, 3) / math.sqrt(q.shape[3]) + indexed(m, x, None)  # pyright: ignore[reportArgumentType]
    return s.softmax(-1) @ v, s.logsumexp(-1)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many blocks":
        monkeypatch.setattr(index, "BLOCK", (16, 24))
        monkeypatch.setattr(chosen, "ROOM", 2000)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("options", [{}, {"learned": True, "init": 0.4}, {"causal": False}], ids=str)
@pytest.mark.parametrize("t", [1, 31, 32, 33, 101])
def test_equals_the_equation(t: int, options: dict, kv_heads: int) -> None:
    m = make(9, 40, **options).eval()
    (q, k, v), view = inputs(t, kv_heads=kv_heads)
    assert view.x is not None
    leaves = [q, k, v, *([] if m.span is None else [m.span.ratio])]
    true, found = dense(m, q, k, v, view.x), run(m, q, k, v, view)
    toward = [torch.randn_like(each) for each in true]
    for a, b in zip(true, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-13)
    each = [
        torch.autograd.grad(sum((x * g).sum() for x, g in zip(pair, toward, strict=True)), leaves)  # pyright: ignore
        for pair in (true, found)
    ]
    for wanted, got in zip(*each, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [33, 500])
def test_with_as_many_keys_as_tokens_it_is_full_attention(keys: int, causal: bool) -> None:
    m, ((q, k, v), view) = make(keys, causal=causal).eval(), inputs(33)
    full = attend(q, k, v, Rule(4, causal=causal), backend="reference")
    found = run(m, q, k, v, view)
    toward = torch.randn_like(full.out)
    for a, b in zip(full, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-14)
    each = [torch.autograd.grad((f.out * toward).sum() + f.lse.sin().sum(), [q, k, v]) for f in (full, found)]
    for wanted, got in zip(*each, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_float32_is_as_close_as_a_dense_softmax_in_float32() -> None:
    m, ((q, k, v), view) = make(9, 40).eval(), inputs(101)
    assert view.x is not None
    true, weights = dense(m, q, k, v, view.x)[0], indexed(m, view.x, None).float()  # pyright: ignore
    low = [t.detach().float() for t in (q, k, v)]
    s = low[0] @ low[1].transpose(2, 3) / math.sqrt(8) + weights
    allowed = 4 * (s.softmax(-1) @ low[2] - true).abs().max() + 16 * torch.finfo(torch.float32).eps * true.abs().max()
    assert (run(m, *low, view).out - true).abs().max() <= allowed


@pytest.mark.usefixtures("blocks")
def test_dropped_weights_are_those_of_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = torch.tensor([77])
    monkeypatch.setattr("spanformer.attention.indexed.draw_seed", lambda *_: seed)
    m, ((q, k, v), view) = make(9, 40, kl=0.0, learned=True, init=0.4).train(), inputs(45, kv_heads=2)
    m.dropout = 0.3
    assert view.x is not None and m.span is not None
    s = q @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(8) + indexed(m, view.x, None)  # pyright: ignore
    rows, at = torch.arange(8).view(2, 4, 1, 1), torch.arange(45)
    kept = keep(seed, 0.3, rows, at[:, None], at)
    true = (s.softmax(-1) * kept / 0.7) @ v.repeat_interleave(2, 1)
    found, toward = run(m, q, k, v, view).out, torch.randn_like(true)
    torch.testing.assert_close(found, true)
    each = [torch.autograd.grad((t * toward).sum(), [q, k, v, m.span.ratio]) for t in (true, found)]
    for wanted, got in zip(*each, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


def test_loss_is_the_divergence_and_reaches_the_index_alone() -> None:
    m, ((q, k, v), view) = make(9, 40, kl=0.7).train(), inputs(45)
    assert view.x is not None
    view = View(x=view.x.requires_grad_())
    run(m, q, k, v, view)
    got = m.penalty(m.rule(), view)
    assert got is not None and view.x is not None
    seen = indexed(m, view.x, None).exp()[:, 0] > 0  # pyright: ignore[reportArgumentType]
    s = torch.where(seen[:, None], q @ k.transpose(2, 3) / math.sqrt(8), -math.inf)
    target = s.softmax(-1).mean(1).detach()
    a, c, w = (view.x @ part.T for part in m.index.split([18, 6, 3]))
    a, c = (t + (eight_bits(t) - t).detach() for t in (a.view(2, 45, 3, 6), c))
    scores = torch.einsum("bin,bnij->bij", w, torch.einsum("bine,bje->bnij", a, c).relu()) / math.sqrt(18)
    log_x = torch.where(seen, scores, -math.inf).log_softmax(-1)
    each = torch.where(seen, target * (target.clamp(min=1e-300).log() - log_x), 0).sum(-1)
    wanted = 0.7 * each.mean()
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(loss, m.index, retain_graph=True)[0] for loss in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)
    others = torch.autograd.grad(got, [q, k, v, view.x], allow_unused=True)
    assert all(g is None or not g.any() for g in others)
    with torch.no_grad():
        run(m, q, k, v, view)
    assert m.penalty(m.rule(), view) is None


def test_the_loss_falls_when_the_index_learns() -> None:
    m, ((q, k, v), view) = make(12).train(), inputs(64)
    assert view.x is not None
    mixed = torch.randn(DIM, 4 * 8, dtype=torch.float64) / 3
    q, k = ((view.x @ mixed).view(2, 64, 4, 8).transpose(1, 2).detach() for _ in range(2))
    losses, steps = [], torch.optim.Adam([m.index], 0.02)
    for _ in range(60):
        run(m, q, k, v.detach(), view)
        loss = m.penalty(m.rule(), view)
        assert loss is not None
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("rest", [1.0, torch.nan])
def test_earlier_outputs_do_not_depend_on_later_tokens(rest: float) -> None:
    m, ((q, k, v), view) = make(16).float().train(), inputs(300, torch.float32)
    outs = []
    for change in (False, True):
        q, k, v, x = (t.detach().clone() for t in (q, k, v, view.x) if t is not None)
        if change:
            for t in (q, k, v, x):
                t[..., 150:, :] = rest * torch.randn_like(t[..., 150:, :])
        outs.append(run(m, q, k, v, View(x=x)).out[:, :, :150])
    assert torch.equal(*outs)


def test_nan_query_touches_its_own_row_alone() -> None:
    m, ((q, k, v), view) = make(7).train(), inputs(50)
    assert view.x is not None
    with torch.no_grad():
        q[0, 1, 20] = torch.nan
    assert run(m, q, k, v, view).out.isnan().any(-1).nonzero().tolist() == [[0, 1, 20]]
    loss = m.penalty(m.rule(), view)
    assert loss is not None
    assert bool(loss.isfinite()) and bool(torch.autograd.grad(loss, m.index)[0].isfinite().all())
    with torch.no_grad():
        view.x[1, 30] = torch.nan  # ranks lowest as a key: no query takes it that has others
        v[1, :, 30] = torch.nan
    found = run(m, q, k, v, view).out.isnan().any(-1).nonzero().tolist()
    assert found == [[0, 1, 20], *([1, head, 30] for head in range(4))]


def test_of_equal_scores_the_later_keys_are_taken() -> None:
    m, ((q, k, v), view) = make(5).eval(), inputs(40)
    assert view.x is not None
    view.x[:] = view.x[:, :1]
    found = run(m, q, k, v, view).out
    torch.testing.assert_close(found, attend(q, k, v, Rule(4, reach=5), backend="reference").out)


def test_documents_and_padding_are_not_ranked() -> None:
    m, ((q, k, v), view) = make(5).eval(), inputs(40)
    documents, padding = (torch.arange(40) // 17).expand(2, 40), (torch.arange(40) % 7 == 2).expand(2, 40)
    found = run(m, q, k, v, View(x=view.x, documents=documents, padding=padding)).out
    assert view.x is not None
    for first, last in ((0, 17), (17, 34), (34, 40)):
        own = [n for n in range(first, last) if n % 7 != 2]
        alone = run(m, *(t[:, :, own] for t in (q, k, v)), View(x=view.x[:, own])).out
        torch.testing.assert_close(found[:, :, own], alone)


def test_nothing_of_the_square_of_the_text_is_built() -> None:
    n = 3000
    m, ((q, k, v), view) = make(8).float().train(), inputs(n, torch.float32, kv_heads=2, rows=1)

    def work() -> None:
        found, loss = run(m, q, k, v, view), m.penalty(m.rule(), view)
        assert loss is not None
        (found.out.sum() + loss).backward()

    assert largest_tensor(work) <= 128 * 1024 * 3 < n * n / 20


def test_budget_is_learned_within_its_limits() -> None:
    m, ((q, k, v), view) = make(20, learned=True, init=0.5, penalty=0.1).train(), inputs(60)
    assert m.span is not None and m.most() == 14 and m.spans() == [10.0] * 4 and m.mean_context() == [14] * 4
    run(m, q, k, v, view)
    loss = m.penalty(m.rule(), view)
    assert loss is not None
    (slope,) = torch.autograd.grad(loss, m.span.ratio)
    torch.testing.assert_close(slope, torch.tensor([0.1 * 20], dtype=slope.dtype))
    with torch.no_grad():
        m.span.ratio.fill_(-3.0)
    m.after_step()
    assert m.spans() == [0.0] * 4 and m.most() == 4
    with torch.no_grad():
        m.span.ratio.fill_(9.0)
    m.after_step()
    assert m.most() == 24


def test_keys_beyond_the_context_are_said_to_be_full_attention() -> None:
    assert make(8, 9).advice() is None
    assert make(9, 9).advice() == (
        "keys is 9 and max_span 9, so every query may take all keys, as full attention does for less; lower keys, or "
        "use full"
    )


def test_a_fixed_index_has_no_gradient() -> None:
    m, ((q, k, v), view) = make(5, kl=0.0).train(), inputs(20)
    run(m, q, k, v, view)
    assert m.penalty(m.rule(), view) is None and not m.index.requires_grad


def small(kind: str, position: str = "sinusoidal", **model) -> LM:
    torch.manual_seed(0)
    return LM(ModelConfig(vocab=13, dim=24, layers=2, heads=4, position=PositionConfig(kind=position),
                          attention=AttentionConfig(kind=kind, max_span=16), **model)).double()  # fmt: skip


def test_autocast_trains_as_float32_does() -> None:
    """The index stays in float32; a step runs its backward pass within autocast, too."""
    x, found = torch.randint(13, (3, 21), generator=torch.Generator().manual_seed(1)), []
    lm = small("indexed(5, learned=true)", "rotary").float().train()
    for enabled in (False, True):
        lm.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = lm(x, targets=x)
            assert output.nll is not None
            (output.nll.mean() + output.penalty).backward()
        found.append((output.nll.detach().mean(), *(p.grad for p in lm.parameters() if p.grad is not None)))
    assert len(found[0]) == len(found[1]) and all(bool(t.isfinite().all()) for t in found[1])
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2**-6, atol=0)  # two bits above bfloat16's own


@pytest.mark.parametrize("stack", ["plain", "reversible"])
def test_recomputed_layers_have_the_same_gradients(stack) -> None:
    x, found = torch.randint(13, (3, 21), generator=torch.Generator().manual_seed(1)), []
    lm = small("indexed(4)", stack=stack).train()
    for again in (False, True):
        lm.checkpointing = again
        lm.zero_grad()
        output = lm(x, targets=x)
        assert output.nll is not None
        (output.nll.mean() + output.penalty).backward()
        found.append({name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None})
    assert any(name.endswith("index") and bool(grad.any()) for name, grad in found[0].items())
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "kind, said",
    [
        ("indexed(0)", r"keys in .* is 0; expected at least 1"),
        ("indexed(4, 0)", r"max_span in .* is 0; expected at least 1"),
        ("indexed(4, index_heads=0)", r"index_heads in .* is 0; expected at least 1"),
        ("indexed(4, index_dim=2000)", r"index_dim is 2000; expected at most 1024"),
        ("indexed(4, kl=-1)", r"kl"),
    ],
)
def test_refusals(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small(kind)


def test_refused_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"keys is 0; expected at least 1"):
        make(0)
    with pytest.raises(ValueError, match=r"kl is -1\.0; expected 0 or more"):
        make(3, kl=-1.0)
    m, ((q, k, v), view) = make(3), inputs(9)
    with pytest.raises(ValueError, match=r"distance_bias was given; Indexed has scores of chosen keys only"):
        m(q, k, v, m.rule() + Rule(4, causal=False, distance_bias=torch.zeros(4, 1000).double()), view)
    with pytest.raises(ValueError, match=r"has no terms by distance; use positions that are added"):
        small("indexed(4)", "alibi")(torch.zeros(1, 5, dtype=torch.long))
