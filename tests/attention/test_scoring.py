"""Other scores than the scaled product, each against its equation, with the rules they go with, and in a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import Rule
from spanformer.attention import AdaptiveSpan, Additive, Bilinear, Dot, General, Mixed, Sinks, View, Window
from spanformer.model.config import PositionConfig
from support.memory_use import Largest
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text, with_attention

F64 = torch.float64
B, H, T, D = 2, 2, 37, 6


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def scorings(inner) -> dict:
    made = {
        "dot": Dot(inner),
        "general": General(inner, D),
        "bilinear": Bilinear(inner, D),
        "additive": Additive(inner, D, 5, queries=8, keys=10),
    }
    for n, scoring in enumerate(made.values()):
        scoring.double()
        for m, p in enumerate(scoring.parameters()):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(10 * n + m)) if p.shape != (H,) else None
    return made


def score(name: str, mechanism, q: Tensor, k: Tensor) -> Tensor:
    """[B, H, T, T] pair by pair of the definition."""
    if name == "dot":
        return torch.einsum("bhid,bhjd->bhij", q, k)
    if name == "general":
        return torch.einsum("bhid,de,bhje->bhij", q, mechanism.weight, k)
    if name == "bilinear":
        return torch.einsum("bhid,de,bhje->bhij", q, mechanism.weight, k) + (k @ mechanism.bias)[:, :, None]
    inner = torch.einsum("bhid,da->bhia", q, mechanism.query)[:, :, :, None]
    inner = inner + torch.einsum("bhjd,da->bhja", k, mechanism.key)[:, :, None]
    return torch.einsum("a,bhija->bhij", mechanism.vector, inner.tanh())


@pytest.mark.parametrize("name", ["dot", "general", "bilinear", "additive"])
def test_equation_and_gradients_under_a_span(name) -> None:
    inner = AdaptiveSpan(H, 20, ramp=5, init=0.3)
    mechanism = scorings(inner)[name]
    q, k, v = (rand(B, H, T, D, seed=s).requires_grad_() for s in range(3))
    padding = torch.arange(T)[None] < torch.tensor([[0], [4]])
    bias = rand(H, T, seed=8).requires_grad_()
    rule = mechanism.rule(View()) + Rule(H, causal=False, distance_bias=bias)
    out = mechanism(mechanism.map_queries(q), k, v, rule, View(padding=padding)).out
    d = torch.arange(T)[:, None] - torch.arange(T)
    z = inner.ratio[:, None, None] * 20
    m = ((5 + z - d) / 5).clamp(0, 1)
    seen = (d >= 0) & ~padding[:, None, None]
    s = score(name, mechanism, q, k) + bias[:, d.clamp(min=0)]
    weight = torch.where(seen, m * s.exp(), 0)
    true = weight @ v / weight.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(out, true)
    wrt, g = [q, k, v, bias, *mechanism.parameters()], rand(B, H, T, D, seed=5)
    got, theirs = (torch.autograd.grad((x * g).sum(), wrt, allow_unused=True) for x in (out, true))
    for mine, other in zip(got, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["dot", "general", "bilinear", "additive"])
def test_future_tokens_have_no_effect(name) -> None:
    mechanism = scorings(Window(H, 9))[name]
    q, k = rand(B, H, T, D), rand(B, H, T, D, seed=1)
    before = mechanism(mechanism.map_queries(q), k, k, mechanism.rule(View()), View()).out
    k[:, :, 20:] += 1
    after = mechanism(mechanism.map_queries(q), k, k, mechanism.rule(View()), View()).out
    assert torch.equal(before[:, :, :20], after[:, :, :20]) and not torch.allclose(before[:, :, 21:], after[:, :, 21:])


def test_additive_scores_are_computed_by_chunks() -> None:
    q = torch.randn(1, H, 256, D, requires_grad=True)
    mechanism = Additive(Window(H, 256), D, 4, queries=16, keys=32)
    with Largest() as seen:
        mechanism(q, q, q, mechanism.rule(View()), View()).out.sum().backward()
    assert seen.most <= H * 16 * 32 * 4 * 2  # all pairs would be H · 256² · 4


@pytest.mark.parametrize("position", ["rotary", "alibi", "table"])
@pytest.mark.parametrize("kind", [Dot, General, Bilinear])
def test_mapped_queries_in_a_model_with_segments_and_a_cache(kind, position) -> None:
    lm, x = make(replace(SMALL, kv_heads=2, position=PositionConfig(kind=position))), text(2, 90)
    for n, block in enumerate(lm.blocks):
        inner = Mixed([Window(1, 9), AdaptiveSpan(3, 30, ramp=5, init=0.4)])
        block.attention.mechanism = made = kind(inner) if kind is Dot else kind(inner, 8)
        for p in made.parameters(recurse=False):
            torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(n), std=0.3)
    lm.double()
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, [50]), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(from_cache(lm, x, [60, *[1] * 10, 20]), whole, rtol=1e-9, atol=1e-9)


def test_additive_in_a_model_by_segments_but_without_a_cache() -> None:
    lm, x = make(replace(SMALL, position=PositionConfig(kind="alibi"))), text(2, 60)
    for block in lm.blocks:
        block.attention.mechanism = Additive(Mixed([Window(1, 9), AdaptiveSpan(3, 30, ramp=5, init=0.4)]), 8)
    lm.double()
    whole, first = lm(x).logits, lm(x[:, :35])
    torch.testing.assert_close(
        torch.cat([first.logits, lm(x[:, 35:], first.state).logits], 1), whole, rtol=1e-9, atol=1e-9
    )
    with pytest.raises(ValueError, match="Additive has no KV cache"):
        lm.cache(2)


def test_refusals() -> None:
    q = rand(B, H, T, D)
    additive = scorings(Window(H, 9))["additive"]
    for name, table in (("distance_vec", rand(1, T, D)), ("distance_scale", rand(H, T))):
        with pytest.raises(
            ValueError, match=f"{name} changes the dot product of query and key, which additive scores do not have"
        ):
            additive(q, q, q, Rule(H, **{name: table}), View())
    with pytest.raises(ValueError, match="the head size is 6; expected 8, for which this scoring was made"):
        General(Window(H, 9), 8).map_queries(q)
    lm = make(SMALL)
    lm.blocks[0].attention.mechanism = Additive(Window(4, 9), 8).double()
    with pytest.raises(
        ValueError,
        match="Additive is incompatible with Rotary positions: its scores are not dot products",
    ):
        lm(text(1, 5))
    with pytest.raises(ValueError, match="Additive cannot share a layer with other kinds"):
        Mixed([Additive(Window(H, 9), D), Window(H, 3)])


@pytest.mark.parametrize("kind", ["dot", "general", "bilinear"])
def test_heads_of_different_scorings_in_one_layer(kind: str) -> None:
    """Also inside another mechanism, and as a mixture of a run file."""
    inner = scorings(Window(H, 9))[kind].double()
    mixed = Mixed([Window(1, 3), Sinks(inner).double(), Window(2, 5)])
    q, k, v = (rand(B, H + 3, T, D, seed=seed) for seed in range(3))
    got = mixed(mixed.map_queries(q), k, v, mixed.rule(View()), View()).out
    some = slice(1, 1 + H)
    alone = mixed.parts[1]
    assert isinstance(alone, Sinks)
    expected = alone(alone.map_queries(q[:, some]), k[:, some], v[:, some], alone.rule(View()), View()).out
    torch.testing.assert_close(got[:, some], expected)
    plain = Window(1, 3)(q[:, :1], k[:, :1], v[:, :1], Window(1, 3).rule(), View()).out
    torch.testing.assert_close(got[:, :1], plain)
    lm = make(with_attention(SMALL, kind=f"2 {kind} + 2 adaptive_span"))
    x = text(2, 30)
    torch.testing.assert_close(lm.decode(x, lm.cache(2)), lm(x).logits, rtol=1e-9, atol=1e-9)
