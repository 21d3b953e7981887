"""LSH attention against the equation in float64, and what a later token may change: nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import LSH, View
from spanformer.attention.lsh import factors_of
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.ops import Attended
from support.content_oracle import lsh as oracle


def run(m: LSH, q: Tensor, v: Tensor, view: View | None = None) -> Attended:
    view = view or View()
    return m(q, q, v, m.rule(view), view)


def inputs(t: int, heads: int = 2, d: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(t)
    q, v = (torch.randn(2, heads, t, d, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    return q.requires_grad_(), v.requires_grad_()


@pytest.mark.parametrize("backend", ["reference", "banded", "native"])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("t", [1, 31, 32, 33, 101])
def test_equals_the_equation(backend: str, learned: bool, t: int) -> None:
    m = LSH(2, 8, 6, buckets=6, rounds=3, learned=learned, init=0.6, ramp=3.0).double()
    m.backend = backend
    q, v = inputs(t)
    q32, v32 = inputs(t, dtype=torch.float32 if backend == "native" else torch.float64)
    true, found = oracle(m, q, v), run(m.to(q32.dtype), q32, v32)
    toward = torch.randn(true.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spans = [] if m.span is None else [m.span.ratio]
    wanted = torch.autograd.grad((true * toward).sum(), [q, v])
    got = torch.autograd.grad((found.out * toward.to(q32.dtype)).sum(), [q32, v32, *spans], allow_unused=True)
    close = 1e-10 if backend != "native" else 2e-5
    for a, b in zip((true, *wanted), (found.out, *got), strict=False):
        torch.testing.assert_close(b.double(), a, rtol=close, atol=close)


def test_span_gradient_equals_the_equation() -> None:
    m = LSH(2, 8, 6, buckets=4, rounds=2, learned=True, init=0.55, ramp=3.0).double()
    assert m.span is not None
    q, v = inputs(60)
    (wanted,) = torch.autograd.grad(oracle(m, q, v).square().sum(), m.span.ratio)
    (got,) = torch.autograd.grad(run(m, q, v).out.square().sum(), m.span.ratio)
    torch.testing.assert_close(got, wanted)
    assert bool((wanted != 0).all())


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_bucket_and_a_wide_window_is_full_attention_without_itself(rounds: int) -> None:
    m = LSH(2, 8, 200, buckets=2, rounds=rounds).double()
    q, v = inputs(70)
    q = q.detach().abs()  # and rotations of one sign: all tokens in one bucket
    m.rotations.abs_()
    k = q / q.norm(dim=-1, keepdim=True)
    score = (q @ k.transpose(-1, -2)).masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(-1), -torch.inf)
    wanted = torch.cat([v[:, :, :1], score[:, :, 1:].softmax(-1) @ v], 2)
    found = run(m, q, v)
    torch.testing.assert_close(found.out, wanted)
    torch.testing.assert_close(found.lse[:, :, 1:], score[:, :, 1:].logsumexp(-1))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("rest", [1.0, torch.nan, torch.inf])
def test_earlier_outputs_do_not_depend_on_later_tokens(learned: bool, rest: float) -> None:
    m = LSH(4, 16, 24, buckets=8, rounds=4, learned=learned, init=0.5)
    q, v = (t.detach() for t in inputs(300, 4, 16, torch.float32))
    before = run(m, q, v)
    q, v = q.clone(), v.clone()
    for t in (q, v):
        t[:, :, 150:] = rest * torch.randn(2, 4, 150, 16)
    after = run(m, q, v)
    assert (before.out - after.out)[:, :, :150].abs().max() <= 1e-6
    assert (before.lse - after.lse)[:, :, :150].abs().max() <= 1e-6


def test_nan_query_touches_its_own_row_alone() -> None:
    m = LSH(2, 8, 40, buckets=2, rounds=2)
    q, v = (t.detach() for t in inputs(50, dtype=torch.float32))
    whole = run(m, q, v)
    broken = q.clone()
    broken[0, 1, 20] = torch.nan
    found = run(m, broken, v)
    assert found.out[0, 1, 20].isnan().all() and found.lse[0, 1, 20].isnan()
    bad = found.out.isnan().any(-1)
    assert int(bad.sum()) == 1
    torch.testing.assert_close(found.out[:, 0], whole.out[:, 0])


def test_padding_is_not_seen_and_takes_no_rank() -> None:
    m = LSH(2, 8, 4, buckets=4, rounds=2).double()
    q, v = (t.detach() for t in inputs(40))
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[:, 10:20] = True
    kept = ~padding[0]
    found = run(m, q, v, View(padding=padding))
    short = run(m, q[:, :, kept], v[:, :, kept])
    torch.testing.assert_close(found.out[:, :, kept], short.out)


def test_rotations_are_in_the_checkpoint_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    a, b = LSH(2, 8, 4, seed=1), LSH(2, 8, 4, seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    assert "rotations" in a.state_dict() and not torch.equal(a.rotations, b.rotations)
    b.load_state_dict(a.state_dict())
    q, v = inputs(30, dtype=torch.float32)
    assert torch.equal(run(a, q, v).out, run(b, q, v).out)


def test_many_buckets_are_two_factors() -> None:
    assert factors_of(128) == (128,) and factors_of(256) == (16, 16) and factors_of(512) == (16, 32)
    m = LSH(1, 8, 4, buckets=256, rounds=2)
    assert m.rotations.shape == (1, 2, 8, 16)
    q = torch.randn(3, 1, 4000, 8)
    ids = m.hashed(q)
    assert int(ids.min()) >= 0 and 200 < int(ids.max()) < 256
    turned = q[:, 0] @ m.rotations[0, 1]
    first, second = (torch.cat([x, -x], -1).argmax(-1) for x in turned.split([8, 8], -1))
    assert torch.equal(ids[:, 0, 1], first + 16 * second)
    assert torch.equal(m.hashed(3 * q), ids)  # the hash knows no lengths


def chunked_oracle(m: LSH, q: Tensor, v: Tensor) -> Tensor:
    """Every pair of one text and head, in a loop."""
    t, out = q.shape[2], torch.zeros_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            meets = torch.zeros(t, t)
            for r in range(m.rounds):
                turned = q[b, h] @ m.rotations[h, r].to(q.dtype)
                ids = torch.cat([turned, -turned], -1).argmax(-1).tolist()
                order = sorted(range(t), key=lambda i, ids=ids: (ids[i], i))
                chunk = {i: n // m.window for n, i in enumerate(order)}
                for i in range(t):
                    for j in range(i):
                        meets[i, j] += ids[i] == ids[j] and chunk[i] - chunk[j] in (0, 1)
            k = q[b, h] / q[b, h].norm(dim=-1, keepdim=True)
            weight = torch.where(meets > 0, (q[b, h] @ k.T).exp(), 0)
            total = weight.sum(-1, keepdim=True)
            out[b, h] = torch.where(total == 0, v[b, h], weight @ v[b, h] / torch.where(total == 0, 1, total))
    return out


@pytest.mark.parametrize("t", [1, 8, 29])
def test_chunked_form_equals_the_paper(t: int) -> None:
    m = LSH(2, 8, 4, buckets=4, rounds=3, chunked=True).double()
    q, v = (x.detach() for x in inputs(t))
    torch.testing.assert_close(run(m, q, v).out, chunked_oracle(m, q, v))


def test_chunked_form_leaks_and_says_so() -> None:
    m = LSH(2, 8, 8, buckets=4, rounds=2, chunked=True).double()
    q, v = (x.detach() for x in inputs(64))
    other = q.clone()
    other[:, :, 32:] = torch.randn(2, 2, 32, 8)
    assert (run(m, q, v).out - run(m, other, v).out)[:, :, :32].abs().max() > 0.01
    config = ModelConfig(vocab=9, dim=16, layers=1, heads=2, position=PositionConfig(kind="none"),
                         attention=AttentionConfig(kind="lsh(4, 4, chunked=true)"))  # fmt: skip
    lm = LM(config)
    assert lm(torch.zeros(1, 9, dtype=torch.long)).logits is not None
    with pytest.raises(ValueError, match="chunked=true has no KV cache: later tokens move the borders of its chunks"):
        lm.cache(1)


def test_learned_span_is_priced_clamped_and_reported() -> None:
    attention = AttentionConfig(kind="lsh(10, 4, 2, learned=true)", ramp=4, init=0.5, penalty=0.1)
    position = PositionConfig(kind="none")
    lm = LM(ModelConfig(vocab=9, dim=16, layers=1, heads=2, position=position, attention=attention))
    x = torch.randint(9, (2, 40))
    assert float(lm(x, targets=x).penalty.detach()) == pytest.approx(0.1 * 5)
    assert lm.spans() == [[5.0, 5.0]] and lm.distances() == [[2 * 9 + 1] * 2]
    with torch.no_grad():
        lm.spans_modules()[0].ratio.copy_(torch.tensor([1.7, -0.2]))
    lm.after_step()
    assert lm.spans() == [[10.0, 0.0]]


def test_all_tokens_in_one_bucket_work() -> None:
    m = LSH(2, 8, 5, buckets=4, rounds=2).double()
    q, v = torch.ones(1, 2, 40, 8).double(), torch.randn(1, 2, 40, 8).double()
    found = run(m, q, v)
    torch.testing.assert_close(found.out[:, :, 20], v[:, :, 15:20].mean(2))


@pytest.mark.parametrize(("options", "said"), [
    ({"buckets": 7}, "buckets is 7; expected an even number"),
    ({"buckets": 130}, "buckets is 130; beyond 128 they are hashed as two even factors, so expected a multiple of 4"),
    ({"window": 0}, "window is 0; expected at least 1"),
    ({"rounds": 0}, "rounds is 0; expected at least 1"),
    ({"buckets": 1 << 20}, "the number of buckets or clusters is 1048576; expected 1 … 65,536"),
    ({"learned": True, "chunked": True}, "learned is true beside chunked"),
])  # fmt: skip
def test_bad_input_is_one_sentence(options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LSH(**({"heads": 2, "head_dim": 8, "window": 4} | options))


def test_all_tokens_in_one_bucket_work_and_are_named() -> None:
    m = LSH(2, 8, 5, buckets=4, rounds=2).double()
    q, v = (t.detach() for t in inputs(40))
    assert m.advice() is None
    run(m, q, v)
    assert m.advice() is None
    alike = q[:, :, :1].expand(-1, -1, 40, -1)
    found = run(m, alike, v).out
    mean = torch.stack([v[:, :, max(0, i - 5) : i].mean(2) for i in range(1, 40)], 2)
    torch.testing.assert_close(found[:, :, 1:], mean)  # equal scores
    said = m.advice()
    assert said is not None and said.startswith(
        "all tokens are in one bucket, in every round: LSH is then a window of 5"
    )
    m.eval()
    run(m, q, v)
    assert m.advice() == said


def test_further_rounds_show_more_and_never_less() -> None:
    mechanism, view = LSH(2, 8, 64, buckets=8, rounds=2), View()
    q = torch.randn(1, 2, 33, 8)
    ones = torch.eye(33).expand(1, 2, 33, 33)

    def seen() -> Tensor:
        return mechanism(q, q, ones, mechanism.rule(view), view).out > 0

    two, kept = seen(), mechanism.rotations.clone()
    mechanism.set_rounds(6)
    more = seen()
    alone = two.sum(-1) == 1  # a token sees itself only if it sees nothing else
    assert (more | ~two)[~alone].all() and more.sum() > two.sum()
    assert torch.equal(mechanism.rotations, LSH(2, 8, 64, buckets=8, rounds=6).rotations)
    mechanism.set_rounds(2)
    assert torch.equal(seen(), two) and torch.equal(mechanism.rotations, kept)
    with pytest.raises(ValueError, match="rounds is 0; expected 1 … 1,024"):
        mechanism.set_rounds(0)
