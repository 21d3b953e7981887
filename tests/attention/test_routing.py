"""Routing: centroids against a loop, when they move, the equation, and what a later token may change: nothing."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from spanformer import LM, Encoder
from spanformer.attention import Routing, View
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.train.diagnose import Diagnosis
from support.content_oracle import norm, routing, routing_top


def run(m: Routing, q: Tensor, v: Tensor, k: Tensor | None = None, view: View | None = None):
    view = view or View()
    return m(q, q if k is None else k, v, m.rule(view), view)


def inputs(t: int, dtype: torch.dtype = torch.float64, count: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(t)
    return [torch.randn(2, 3, t, 8, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(count)]


@pytest.mark.parametrize("backend", ["reference", "banded", "native"])
@pytest.mark.parametrize("t", [1, 31, 32, 33, 101])
def test_equals_the_equation(backend: str, t: int) -> None:
    m = Routing(3, 8, 6, clusters=5).double().eval()
    m.backend = backend
    q, v = inputs(t)
    same = inputs(t, torch.float32 if backend == "native" else torch.float64)
    true, found = routing(m, q, v), run(m.to(same[0].dtype), *same).out
    toward = torch.randn(true.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((true * toward).sum(), [q, v])
    got = torch.autograd.grad((found * toward.to(found.dtype)).sum(), same)
    close = 1e-10 if backend != "native" else 2e-5
    for a, b in zip((true, *wanted), (found, *got), strict=True):
        torch.testing.assert_close(b.double(), a, rtol=close, atol=close)


@pytest.mark.parametrize("t, window", [(1, 3), (29, 6), (29, 40)])
def test_top_form_equals_the_equation(t: int, window: int) -> None:
    m = Routing(3, 8, window, clusters=4, causal=False).double().eval()
    q, k, v = inputs(t, count=3)
    true, found = routing_top(m, q, k, v), run(m, q, v, k)
    torch.testing.assert_close(found.out, true)
    toward = torch.randn(true.shape, dtype=torch.float64)
    for a, b in zip(*(torch.autograd.grad((x * toward).sum(), [q, k, v]) for x in (true, found.out)), strict=True):
        torch.testing.assert_close(b, a)


def test_top_form_leaves_padding_out() -> None:
    m = Routing(3, 8, 40, clusters=2, causal=False).double().eval()
    q, k, v = (t.detach() for t in inputs(30, count=3))
    padding = (torch.arange(30) >= 20).expand(2, 30)
    found = run(m, q, v, k, View(padding=padding))
    alone = run(m, *(t[:, :, :20] for t in (q, v, k)))
    torch.testing.assert_close(found.out[:, :, :20], alone.out)


@pytest.mark.parametrize("rest", [1.0, torch.nan])
def test_earlier_outputs_do_not_depend_on_later_tokens(rest: float) -> None:
    m = Routing(3, 8, 16, clusters=6).eval()
    q, v = (t.detach() for t in inputs(300, torch.float32))
    before = run(m, q, v).out
    q, v = q.clone(), v.clone()
    for t in (q, v):
        t[:, :, 150:] = rest * torch.randn(2, 3, 150, 8)
    assert (before - run(m, q, v).out)[:, :, :150].abs().max() <= 1e-6


def test_nan_query_touches_its_own_row_alone() -> None:
    m = Routing(3, 8, 40, clusters=2).train()
    q, v = (t.detach() for t in inputs(50, torch.float32))
    q[0, 1, 20] = torch.nan
    q.requires_grad_()
    found = run(m, q, v).out
    assert found.isnan().any(-1).nonzero().tolist() == [[0, 1, 20]]
    m.after_step()
    assert m.centroids.isfinite().all()


def moved(m: Routing, xs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Centroids, sums and counts after a step with these x [B, H, T, D], token by token."""
    sums, counts = torch.zeros_like(m.sums), torch.zeros_like(m.counts)
    for x in xs:
        for b in range(x.shape[0]):
            for h in range(x.shape[1]):
                for token in norm(x[b, h]):
                    c = int((m.centroids[h] @ token).argmax())
                    sums[h, c] += token
                    counts[h, c] += 1
    sums, counts = (m.decay * a + (1 - m.decay) * b for a, b in ((m.sums, sums), (m.counts, counts)))
    total = counts.sum(1, keepdim=True)
    smooth = (counts + 1e-5) / (total + m.buckets * 1e-5) * total
    return sums / smooth[..., None], sums, counts


def test_centroids_move_once_per_step_as_in_a_loop() -> None:
    m = Routing(3, 8, 6, clusters=4, decay=0.9).double().train()
    batches = [inputs(t)[0] for t in (20, 31)]
    v = torch.randn(2, 3, 31, 8).double()
    wanted = moved(m, [x.detach() for x in batches])
    start = m.centroids.clone()
    for x in batches:  # two pieces of one batch
        run(m, x, v[:, :, : x.shape[2]])
    assert torch.equal(m.centroids, start)
    m.after_step()
    for got, want in zip((m.centroids, m.sums, m.counts), wanted, strict=True):
        torch.testing.assert_close(got, want)
    now = m.centroids.clone()
    m.after_step()
    assert torch.equal(m.centroids, now)


def test_commitment_loss_is_the_mean_square_and_reaches_queries() -> None:
    m = Routing(3, 8, 6, clusters=4, commitment=0.5).double().train()
    q, v = inputs(20)
    run(m, q, v)
    x = norm(q)
    ids = (x @ m.centroids.transpose(1, 2)).argmax(-1)
    own = torch.stack([m.centroids[h][ids[:, h]] for h in range(3)], 1)
    wanted, got = 0.5 * (x - own).square().sum(-1).mean(), m.penalty(m.rule(View()), View())
    assert got is not None
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got, q), torch.autograd.grad(wanted, q))
    with torch.no_grad():
        run(m, q, v)
    assert m.penalty(m.rule(View()), View()) is None


def small(kind: str, **model) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(vocab=13, dim=24, layers=2, heads=4, position=PositionConfig(kind="sinusoidal"),
                         attention=AttentionConfig(kind=kind), **model)  # fmt: skip
    return LM(config)


def centroids(lm: LM) -> list[Tensor]:
    return [m.centroids.clone() for m in lm.modules() if isinstance(m, Routing)]


def test_evaluation_and_decoding_move_nothing() -> None:
    lm, x = small("routing(5, 4)"), torch.randint(13, (2, 20))
    start = centroids(lm)
    lm.eval()
    lm(x)
    lm.train()
    lm.decode(x, lm.cache(2))
    with torch.no_grad():
        lm(x)
    lm.after_step()
    assert all(map(torch.equal, start, centroids(lm)))


@pytest.mark.parametrize("kind", ["routing(5, 4)", "2 window(6) + 2 routing(5, 4)"])
def test_recomputed_layers_count_their_tokens_once(kind: str) -> None:
    found, x = [], torch.randint(13, (2, 20))
    for recomputed in (False, True):
        lm = small(kind)
        lm.checkpointing = recomputed
        state = None
        for piece in x.split(10, 1):  # the second by segments
            out = lm(piece, state, targets=piece)
            assert out.nll is not None
            (out.nll.mean() + out.penalty).backward()
            state = out.state
        lm.after_step()
        found.append([*centroids(lm), *(p.grad for p in lm.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def _process(rank: int, size: int, port: int, results) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    m, (q, v) = Routing(3, 8, 6, clusters=4).double().train(), inputs(20)
    run(m, q[rank : rank + 1], v[rank : rank + 1])
    m.after_step()
    results.put((rank, m.centroids.tolist()))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_centroids_of_one() -> None:
    m, (q, v) = Routing(3, 8, 6, clusters=4).double().train(), inputs(20)
    run(m, q, v)
    m.after_step()
    context, port = mp.get_context("spawn"), 29000 + torch.initial_seed() % 1000
    results = context.Queue()
    processes = [context.Process(target=_process, args=(rank, 2, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    for rank in range(2):
        torch.testing.assert_close(torch.tensor(found[rank], dtype=torch.float64), m.centroids)


def test_occupancy_and_collapse() -> None:
    m = Routing(3, 8, 6, clusters=4).double().train()
    assert m.occupancy() is None and m.advice() is None
    q, v = inputs(200)
    run(m, q, v)
    m.after_step()
    spread = m.occupancy()
    assert spread is not None and spread.least <= 0.25 <= spread.most and 1 < spread.entropy <= 2
    assert m.advice() is None
    run(m, q[:, :, :1].expand(q.shape)[:1], v[:1])
    m.after_step()
    assert m.occupancy() == (0.0, 1.0, 0.0)
    said = m.advice()
    assert said is not None and said.startswith("clusters have collapsed: the fullest holds 100% of a head's tokens")


def test_collapse_is_logged_once(tmp_path) -> None:
    lm = small("routing(5, 4)")
    for m in lm.modules():
        if isinstance(m, Routing):
            m._occupied = torch.tensor([[9.0, 0, 0, 0]] * 4)
    diagnosis = Diagnosis.__new__(Diagnosis)
    diagnosis.said = set()
    first = diagnosis.advice(lm.advice())
    assert len(first) == 2 and first[1].startswith("layer 2: clusters have collapsed")
    assert diagnosis.advice(lm.advice()) == []


def test_encoder_reads_both_ways() -> None:
    attention, position = AttentionConfig(kind="routing(30, 2)"), PositionConfig(kind="sinusoidal")
    config = ModelConfig(
        vocab=13, dim=24, layers=1, heads=4, kind="encoder", position=position, attention=attention
    )  # fmt: skip
    torch.manual_seed(0)
    encoder, x = Encoder(config).eval(), torch.randint(13, (1, 20))
    other = x.clone()
    other[0, -1] = (x[0, -1] + 1) % 13
    assert not torch.allclose(encoder(x).logits[:, 0], encoder(other).logits[:, 0])


@pytest.mark.parametrize(("options", "said"), [
    ({"window": 0}, "window is 0; expected at least 1"),
    ({"clusters": 0}, "the number of buckets or clusters is 0; expected 1 … 65,536"),
    ({"decay": 1.0}, "decay is 1.0; expected 0 … 1, 1 excluded"),
    ({"commitment": -1.0}, "commitment is -1.0; expected 0 or more"),
])  # fmt: skip
def test_bad_input_is_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Routing(**({"heads": 2, "head_dim": 8, "window": 4} | options))
