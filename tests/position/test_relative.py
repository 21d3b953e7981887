"""Shaw, Transformer-XL, T5 and DA-Transformer: each against its paper's equation, pair by pair in float64, with every
gradient; causal and both ways, with memory, at given positions."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

from spanformer.attention import View
from spanformer.ops import Rule, attend
from spanformer.position import T5, DATransformer, Position, Shaw, TransformerXL

H, D, DIM, T = 2, 4, 6, 13
F64 = torch.float64


def angle(n: int, c: int) -> float:
    return n * 10000.0 ** (-2 * (c // 2) / DIM)


def r_vector(n: int) -> Tensor:
    return torch.tensor([(math.sin, math.cos)[c % 2](angle(n, c)) for c in range(DIM)], dtype=F64)


def shaw_equation(m: Shaw, h: int, q: Tensor, k: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """The score of one pair, and what joins the value."""
    c = max(-m.clip, min(m.clip, d)) + (0 if m.causal else m.clip)
    return q @ (k + m.keys[c]) / math.sqrt(D), m.values[c]


def xl_equation(m: TransformerXL, h: int, q: Tensor, k: Tensor, d: int) -> tuple[Tensor, float]:
    r = m.weight[h] @ r_vector(d)
    return (q @ k + q @ r + m.u[h] @ k + m.v[h] @ r) / math.sqrt(D), 0.0


def t5_equation(m: T5, h: int, q: Tensor, k: Tensor, d: int) -> tuple[Tensor, float]:
    count = m.buckets if m.causal else m.buckets // 2
    bucket, half = (0 if m.causal or d >= 0 else count), count // 2
    if abs(d) < half:
        bucket += abs(d)
    else:
        share = math.log(abs(d) / half) / math.log(m.max_distance / half)
        bucket += min(half + int(share * (count - half)), count - 1)
    return q @ k / math.sqrt(D) + m.bias[h, bucket], 0.0


def da_equation(m: DATransformer, h: int, q: Tensor, k: Tensor, d: int) -> tuple[Tensor, float]:
    f = (1 + m.v[h].exp()) / (1 + (m.v[h] - m.w[h] * abs(d)).exp())
    return torch.relu(q @ k) * f / math.sqrt(D), 0.0


KINDS = {
    "shaw": (lambda causal: Shaw(H, D, 3, causal=causal), shaw_equation),
    "transformer_xl": (lambda causal: TransformerXL(DIM, H, D, causal=causal), xl_equation),
    "t5": (lambda causal: T5(H, 8, 11, causal=causal), t5_equation),
    "da_transformer": (lambda causal: DATransformer(H), da_equation),
}


def made(kind: str, causal: bool) -> Position:
    torch.manual_seed(1)
    module = KINDS[kind][0](causal).double()
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    return module


def qkv(tq: int, tk: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(tq + tk)
    return [torch.randn(1, H, t, D, generator=g, dtype=F64, requires_grad=True) for t in (tq, tk, tk)]


def by_equation(kind: str, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, q_at, k_at, causal: bool) -> Tensor:
    equation, out = KINDS[kind][1], []
    for h in range(H):
        for i, p in enumerate(q_at):
            seen = [j for j, place in enumerate(k_at) if not causal or place <= p]
            pairs = [equation(module, h, q[0, h, i], k[0, h, j], p - k_at[j]) for j in seen]
            weights = torch.stack([score for score, _ in pairs]).softmax(0)
            out.append(sum(w * (v[0, h, j] + pair[1]) for w, j, pair in zip(weights, seen, pairs, strict=True)))
    return torch.stack(out).view(1, H, len(q_at), D)


PLACES = {
    "one text": (list(range(T)), list(range(T)), False),
    "with memory": (list(range(T - 4, T)), list(range(T)), False),
    "given": ([5, 0, 9, 30], [0, 3, 9, 5, 1, 30, 22], True),
}


@pytest.mark.parametrize("backend", ["reference", "banded"])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_papers_equation(kind: str, causal: bool, places: str, backend: str) -> None:
    q_at, k_at, given = PLACES[places]
    module, (q, k, v) = made(kind, causal), qkv(len(q_at), len(k_at))
    view = View(q_positions=torch.tensor(q_at), k_positions=torch.tensor(k_at)) if given else View()
    turned = module.encode(q, k, view)
    rule = Rule(H, causal=causal) + module.rule(view, max(*q_at, *k_at) + 1)
    got = attend(*turned, v, rule, backend=backend, q_positions=view.q_positions, k_positions=view.k_positions).out
    expected = by_equation(kind, module, q, k, v, q_at, k_at, causal)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    leaves, weight = [q, k, v, *module.parameters()], torch.randn_like(expected)
    grads = (torch.autograd.grad(x, leaves, weight, retain_graph=True) for x in (got, expected))
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_future_keys_have_no_effect(kind: str) -> None:
    module, (q, k, v) = made(kind, True), qkv(T, T)
    rule = Rule(H) + module.rule(View(), T)
    first = attend(*module.encode(q, k, View()), v, rule, backend="banded").out
    k, v = (torch.cat([t[:, :, :7], torch.randn_like(t[:, :, 7:]) * 9], 2) for t in (k, v))
    again = attend(*module.encode(q, k, View()), v, rule, backend="banded").out
    assert torch.equal(first[:, :, :7], again[:, :, :7]) and not torch.allclose(first[:, :, 7:], again[:, :, 7:])


@pytest.mark.parametrize("kind", KINDS)
def test_longer_table_gives_the_same_result(kind: str) -> None:
    """Any number of distances may be asked for: relative positions do not end."""
    for causal in (True, False):
        module = made(kind, causal)
        short, long = (Rule(H, causal=causal) + module.rule(View(), n) for n in (1, 300))
        q, k, v = qkv(1, 1)
        one, other = (attend(*module.encode(q, k, View()), v, rule, backend="banded").out for rule in (short, long))
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_t5s_own(causal: bool) -> None:
    theirs = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    distance = torch.arange(0 if causal else -3000, 3000)
    for buckets, farthest in ((32, 128), (16, 40), (64, 1000), (4, 7)):
        expected = theirs(-distance, bidirectional=not causal, num_buckets=buckets, max_distance=farthest)
        assert torch.equal(T5(1, buckets, farthest, causal=causal).bucket(distance), expected)


def test_head_that_prefers_what_is_near_does_not_overflow_far_away() -> None:
    module = DATransformer(2)
    with torch.no_grad():
        module.w.copy_(torch.tensor([-2.0, 2.0])), module.v.copy_(torch.tensor([3.0, -50.0]))
    table = module.rule(View(), 100_000).distance_scale
    torch.testing.assert_close(table[:, [0, -1]].detach(), torch.tensor([[1.0, 0], [1, 1]]))
    table.sum().backward()
    assert module.w.grad.isfinite().all() and module.v.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shaw(2, 4, 0), "heads is 2, head_dim 4 and clip 0; expected at least 1 each"),
        (lambda: TransformerXL(0, 2, 4), "dim is 0, heads 2 and head_dim 4; expected at least 1 each"),
        (lambda: DATransformer(0), "heads is 0; expected at least 1"),
        (
            lambda: T5(2, 3),
            "heads is 2, buckets 3 and max_distance 128; expected at least 1 head, 2 or more buckets, an even number, "
            "and a distance beyond the first 1",
        ),
        (
            lambda: T5(2, 8, 2, causal=False),
            "heads is 2, buckets 8 and max_distance 2; expected at least 1 head, 4 or more buckets, an even number, "
            "and a distance beyond the first 2",
        ),
    ],
)
def test_relative_positions_bad_arguments(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
