"""Heads of several kinds in one layer: the joined rule against each part by itself, values and gradients."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor

from spanformer import AdaptiveSpan, BlockIndex, DynamicSpan, HeadGroups, Rule, Union, attend
from spanformer.attention import Mixed, View, Window
from spanformer.attention.mixed import join
from spanformer.memory import HiddenStates, hidden_states
from spanformer.model.layer import SelfAttention
from spanformer.ops import AnyRule
from spanformer.position import Alibi

F64 = torch.float64
B, T, D = 2, 41, 6


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def pattern(heads: int, size: int = 8, length: int = T, seed: int = 0) -> BlockIndex:
    g = torch.Generator().manual_seed(seed)
    return BlockIndex.from_dense(torch.rand(heads, length, length, generator=g) < 0.6, size)


def parts() -> dict[str, Rule | Union]:
    """One rule of every kind, two heads each."""
    return {
        "empty": Rule(2),
        "reach": Rule(2, reach=[3, 20]),
        "span": Rule(2, span=torch.tensor([2.5, 11.0], dtype=F64), ramp=4),
        "other ramp": Rule(2, span=torch.tensor([0.0, 30.0], dtype=F64), ramp=9),
        "dynamic": Rule(2, span=rand(B, 2, T).abs() * 9, ramp=4),
        "distance_bias": Rule(2, distance_bias=rand(2, T)),
        "shared vectors": Rule(2, distance_vec=rand(1, T, D)),
        "vectors": Rule(2, distance_vec=rand(2, T, D, seed=1)),
        "key_bias": Rule(2, key_bias=rand(B, 2, T)),
        "one key_bias": Rule(2, key_bias=rand(1, 1, T, seed=3)),
        "key_span": Rule(2, key_span=rand(B, 1, T).abs() * 9, ramp=4),
        "forget": Rule(2, forget=-rand(B, 2, T).abs().cumsum(-1) / 9),
        "sink_logits": Rule(2, sink_logits=rand(2), reach=7),
        "sink_tokens": Rule(2, sink_tokens=3, reach=5),
        "blocks": Rule(2, blocks=pattern(2)),
        "shared blocks": Rule(2, blocks=pattern(1, seed=5), reach=30),
        "other blocks": Rule(2, blocks=pattern(1, size=4)),
        "stride": Rule(2, stride=[3, 1], skip=[0, 2], reach=30),
        "union": Union(Rule(2, reach=5), Rule(2, stride=4, skip=5)),
        "distance_value": Rule(2, distance_value=rand(2, 4, D)),
        "distance_scale": Rule(2, distance_scale=rand(2, T).abs()),
    }


def check(rules: list[Rule | Union], kv_heads: int, backend: str = "banded") -> AnyRule:
    """The joined rule's attention is each part's own, gradients of its terms included."""
    joined, heads = join(rules), sum(rule.heads for rule in rules)
    q, k, v = (
        t.requires_grad_()
        for t in (rand(B, heads, T, D), rand(B, kv_heads, T, D, seed=1), rand(B, kv_heads, T, D, seed=2))
    )
    terms = [
        t
        for rule in rules
        for leaf in rule.leaves()
        for t in vars(leaf).values()
        if isinstance(t, Tensor) and t.is_floating_point() and t.ndim
    ]
    terms = list(dict.fromkeys(terms))
    for t in terms:
        t.requires_grad_()
    joined = join(rules)
    alone, first = [], 0
    for rule in rules:
        mine = torch.arange(first, first + rule.heads)
        own = mine // (heads // kv_heads)
        alone.append(attend(q[:, mine], k[:, own], v[:, own], rule, backend="reference"))
        first += rule.heads
    truth = torch.cat([a.out for a in alone], 1), torch.cat([a.lse for a in alone], 1)
    got = attend(q, k, v, joined, backend=backend)
    weights = [rand(*t.shape, seed=9) for t in truth]
    for mine, theirs in zip(got, truth, strict=True):
        torch.testing.assert_close(mine, theirs)

    def gradients(found) -> tuple[Tensor | None, ...]:
        loss = sum((x.nan_to_num(neginf=0) * w).sum() for x, w in zip(found, weights, strict=True))
        return torch.autograd.grad(loss, [q, k, v, *terms], allow_unused=True)

    grads = gradients(got), gradients(truth)
    for mine, theirs in zip(*grads, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)
    return joined


@pytest.mark.parametrize("names", list(itertools.combinations(parts(), 2)), ids=" and ".join)
def test_any_two_kinds_in_one_layer(names) -> None:
    check([parts()[name] for name in names], kv_heads=4)


def test_all_kinds_at_once_and_key_heads_that_parts_share() -> None:
    rules = list(parts().values())
    joined = check(
        [Rule(1, reach=9), *rules, Rule(1)], kv_heads=4
    )  # 36 heads, nine to a key head: cut across the parts
    assert joined.limits()[0] == 9 and min(joined.limits()[1:3]) > 1 << 20


def test_rules_that_differ_in_numbers_join_into_one() -> None:
    kinds = parts()
    for names in (
        ("empty", "reach", "stride", "span", "dynamic"),
        ("shared vectors", "vectors"),
        ("key_bias", "one key_bias"),
        ("blocks", "shared blocks"),
    ):
        assert isinstance(join([kinds[name] for name in names]), Rule), names
    same = Rule(2, distance_vec=kinds["shared vectors"].distance_vec)
    assert join([kinds["shared vectors"], same]).distance_vec is same.distance_vec
    assert len(join([kinds["span"], kinds["empty"], kinds["other ramp"]]).groups) == 2
    assert len(join([kinds["union"], kinds["union"], HeadGroups([kinds["empty"], kinds["reach"]])]).groups) == 3


@pytest.mark.parametrize("heads", [[0, 1, 2, 3], [3], [2, 0], [1, 2, 1], [0, 5, 4]])
def test_some_heads_of_a_joined_rule(heads) -> None:
    kinds = parts()
    rule = join([kinds["sink_tokens"], kinds["blocks"], kinds["span"]])
    q, k = rand(B, 6, T, D), rand(B, 6, T, D, seed=1)
    every = attend(q, k, k, rule, backend="banded").out
    some = attend(q[:, heads], k[:, heads], k[:, heads], rule.for_heads(heads, heads), backend="banded").out
    torch.testing.assert_close(some, every[:, heads])


def test_for_heads_takes_each_heads_pattern() -> None:
    rule = Rule(4, blocks=pattern(4), reach=30)
    q = rand(B, 4, T, D)
    every = attend(q, q, q, rule, backend="banded").out
    some = attend(q[:, [3, 1]], q[:, [3, 1]], q[:, [3, 1]], rule.for_heads([3, 1], [3, 1]), backend="banded").out
    torch.testing.assert_close(some, every[:, [3, 1]])


def test_adding_to_head_groups() -> None:
    kinds = parts()
    rules = [kinds["span"], kinds["other ramp"], Rule(2, sink_logits=rand(2))]
    table, bias = Rule(6, causal=False, distance_bias=rand(6, T)), Rule(6, causal=False, key_bias=rand(B, 3, T))
    padding = View(padding=torch.arange(T)[None].expand(B, -1) < 4).rule(6)
    joined = join(rules) + table + bias + padding
    q, k = rand(B, 6, T, D), rand(B, 6, T, D, seed=1)
    each = [
        rule
        + table.for_heads(range(n, n + 2))
        + bias.for_heads(range(n, n + 2))
        + dataclasses.replace(padding, heads=2)
        for n, rule in zip((0, 2, 4), rules, strict=True)
    ]
    alone = [
        attend(q[:, n : n + 2], k[:, n : n + 2], k[:, n : n + 2], rule, backend="reference").out
        for n, rule in zip((0, 2, 4), each, strict=True)
    ]
    torch.testing.assert_close(attend(q, k, k, joined, backend="banded").out, torch.cat(alone, 1))
    cut = join([Rule(3, sink_tokens=1, reach=4), Rule(3, reach=9)]) + join([Rule(2), Rule(4, sink_logits=rand(4))])
    assert [part.heads for part in cut.groups] == [2, 1, 3]


def test_causality() -> None:
    rule = join(
        [rule for rule in parts().values() if rule.leaves()[0].key_span is None and rule.leaves()[0].key_bias is None]
    )
    q, k = rand(B, rule.heads, T, D), rand(B, rule.heads, T, D, seed=1)
    before = attend(q, k, k, rule, backend="banded").out
    k[:, :, 25:] += 1
    after = attend(q, k, k, rule, backend="banded").out
    assert torch.equal(before[:, :, :25], after[:, :, :25])
    assert not torch.equal(before[:, :, 25:], after[:, :, 25:])


def test_mixed_bad_parts() -> None:
    with pytest.raises(
        ValueError, match="the heads of one layer have causal = True and False; expected one value for all"
    ):
        join([Rule(2), Rule(2, causal=False)])
    with pytest.raises(ValueError, match="groups is empty; expected the rule of at least one group"):
        HeadGroups([])
    with pytest.raises(ValueError, match="groups holds a HeadGroups; expected one Rule or Union per group"):
        HeadGroups([HeadGroups([Rule(2), Rule(2, sink_tokens=1)]), Rule(2)])  # pyright: ignore
    with pytest.raises(ValueError, match="groups holds rules with causal = True and False"):
        HeadGroups([Rule(2), Rule(2, causal=False)])
    with pytest.raises(ValueError, match="rules of 4 and 5 heads cannot be added"):
        HeadGroups([Rule(2), Rule(2)]) + Rule(5)
    with pytest.raises(ValueError, match="rules with ramps 4 and 9 cannot be added; span and key_span share one"):
        parts()["key_span"] + parts()["other ramp"]
    with pytest.raises(
        ValueError, match="both rules have a key_span; a head takes only one, so drop it from one of them"
    ):
        parts()["key_span"] + parts()["key_span"]
    with pytest.raises(ValueError, match="parts is empty"):
        Mixed([])
    q = rand(B, 4, T, D)
    with pytest.raises(ValueError, match="expected 6 heads in q, as in the rule"):
        attend(q, q, q, join([Rule(2), Rule(4, sink_tokens=1)]))


def test_layer_of_head_groups_trims_each_and_adds_their_penalties(monkeypatch) -> None:
    """Remembered tokens are trimmed for each group of heads, and positions added to all of them."""
    torch.manual_seed(0)
    spans = [
        AdaptiveSpan(2, 16, ramp=3, init=0.2),
        AdaptiveSpan(2, 16, ramp=5, init=1.0),
        DynamicSpan(24, 2, 8, ramp=5),
    ]
    mixed = Mixed([*spans, Window(2, 3)])
    layer, position = SelfAttention(8 * 3, 4, mixed, None).double(), Alibi(8).double()
    past, x = rand(B, 40, 24), rand(B, 7, 24, seed=1)
    out, penalty = layer(x, HiddenStates(past), View(), position)
    monkeypatch.setattr(hidden_states, "group_heads", lambda context, past, device: [([0, 1, 2, 3], past)])
    every, same = layer(x, HiddenStates(past), View(), position)  # nothing is trimmed
    torch.testing.assert_close(out, every)
    alone = sum(span.penalty(span.rule(View(x=x)), View(x=x)) for span in spans)
    assert penalty is not None and float(penalty.detach()) > 0
    torch.testing.assert_close(penalty, alone)
    torch.testing.assert_close(penalty, same)
