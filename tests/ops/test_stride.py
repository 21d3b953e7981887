"""Strides, skips and unions of rules: what they see, and that every backend gives what the dense oracle gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from spanformer import BlockIndex, Rule, Union, attend, attend_rings, choose_backend
from spanformer.ops import Rings
from support.cases import Case, check, make, run

CASES = [
    Case(tq=33, tk=33, stride=(4,)),
    Case(tq=33, tk=33, stride=(4,), causal=False, reach=(9, 40)),
    Case(tq=63, tk=129, h=4, hkv=2, b=2, stride=(3,), reach=(7, 70), terms=("span", "sink_logits")),
    Case(tq=63, tk=129, h=4, hkv=2, b=2, stride=(3,), causal=False, terms=("padding", "distance_bias")),
    Case(tq=17, tk=40, h=4, hkv=2, stride=(1, 3), b=2, terms=("dynamic", "key_bias")),
    Case(tq=17, tk=40, h=4, hkv=2, stride=(1, 1, 5, 5), skip=(0, 0, 2, 5), b=2, terms=("distance_vec",)),
    Case(tq=3, tk=50, b=2, stride=(8,), terms=("span", "head_vec")),
    Case(tq=1, tk=33, stride=(5,), terms=("documents",)),
    Case(tq=5, tk=33, b=2, stride=(7,), causal=False, terms=("dynamic",)),
    Case(tq=21, tk=21, b=2, stride=(4,), terms=("span", "documents")),
    Case(tq=40, tk=40, stride=(3,), terms=("blocks",)),
    Case(tq=19, tk=31, b=3, stride=(3,), skip=(4,), positions="rows", terms=("span", "key_bias")),
    Case(tq=19, tk=31, stride=(2,), positions="shuffled", terms=("distance_bias",)),
    Case(tq=33, tk=33, skip=(3, 0), terms=("span",)),
    Case(tq=33, tk=33, skip=(3,), causal=False, reach=(9,), terms=("distance_bias",)),
    Case(tq=1, tk=1, stride=(9,)),
    Case(tq=40, tk=40, stride=(4,), sink_tokens=3, reach=(9, 17)),
]


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_oracle(case: Case, backend: str) -> None:
    check(case, backend)


def seen(rule: Rule, t: int, backend: str) -> Tensor:
    """[H, t, t] which pairs have weight: values are one-hot, so a row of the output is a row of weights."""
    q = torch.zeros(1, rule.heads, t, 4)
    values = torch.eye(t).expand(1, rule.heads, t, t).contiguous()
    return attend(q, q, values, rule, backend=backend).out[0] > 0


@pytest.mark.parametrize("backend", ["reference", "native", "banded"])
@pytest.mark.parametrize("causal", [True, False])
def test_pair_by_pair(causal: bool, backend: str) -> None:
    rule = Rule(3, causal=causal, stride=[1, 3, 4], skip=[2, 0, 5], reach=[6, 100, 13])
    weights = seen(rule, 29, backend)
    for h, (stride, skip, reach) in enumerate([(1, 2, 6), (3, 0, 100), (4, 5, 13)]):
        for i, j in itertools.product(range(29), range(29)):
            d = i - j if causal else abs(i - j)
            assert bool(weights[h, i, j]) == (d >= 0 and d % stride == 0 and skip <= d < reach), (h, i, j)


def union_of(rule: Rule, q: Tensor, k: Tensor, v: Tensor, backend: str) -> list[Tensor]:
    leaves = a, b, c = [t.clone().requires_grad_() for t in (q, k, v)]
    found = attend(a, b, c, rule, backend=backend)
    loss = (
        found.out * torch.arange(float(found.out.numel())).view(found.out.shape).sin()
    ).sum() + found.lse.cos().sum()
    return [found.out, found.lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_union_equals_one_softmax_over_both(backend: str) -> None:
    """Also with the terms that are added to it, and with kept keys, which only one of the parts may see."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 4, 45, 8, generator=g) for _ in range(3))
    bias = torch.randn(2, 1, 45, generator=g)
    window = Union(Rule(4, reach=6), Rule(4, stride=6, skip=6, reach=[45, 0, 45, 13]))
    whole = (window + Rule(4, key_bias=bias, sink_logits=torch.randn(4, generator=g)), window + Rule(4, sink_tokens=3))
    for rule in (window, *whole):
        exact = union_of(rule, q.double(), k.double(), v.double(), "reference")
        dense = union_of(rule, q, k, v, "reference")
        for true, same, got in zip(exact, dense, union_of(rule, q, k, v, backend), strict=True):
            assert (got - true).abs().max() <= 4 * (same - true).abs().max() + 1e-6


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_union_sees_the_pairs_of_both(backend: str) -> None:
    rule = Union(Rule(2, reach=4), Rule(2, stride=4, skip=4)) + Rule(2, sink_tokens=2)
    weights = seen(rule, 23, backend)
    for i, j in itertools.product(range(23), range(23)):
        d = i - j
        assert bool(weights[0, i, j]) == (d >= 0 and (d < 4 or d % 4 == 0 or j < 2)), (i, j)


def test_adding_unions() -> None:
    """(a ∪ b) + (c ∪ d) sees what both see, part by part."""
    a = Union(Rule(1, reach=5), Rule(1, stride=5, skip=5))
    dense = torch.rand(31, 31, generator=torch.Generator().manual_seed(0)) < 0.5
    c = Union(*(Rule(1, blocks=BlockIndex.from_dense(mask, 8)) for mask in (dense, ~dense)))
    for rule in (a + c, c + a):
        assert torch.equal(seen(rule, 31, "native"), seen(a, 31, "reference"))
    total = a + Rule(1, sink_logits=torch.ones(1))
    assert [leaf.sink_logits is None for leaf in total.leaves()] == [False, True]
    assert a.limits() == a.reach_list() == [1 << 40] and len(a.for_heads([0], [0]).rules) == 2
    assert len((a + c).rules) == 4 and len(Union(a, Rule(1, reach=0)).rules) == 3


def test_stride_alone_sees_and_costs_only_its_class() -> None:
    """The backend is handed a class at a time: nothing as long as the sequence."""
    q = torch.randn(1, 2, 64, 8)
    lengths = []
    from spanformer.ops.backends.reference import attend_reference
    from spanformer.ops.lower import lower, make_call

    def note(call):
        lengths.append((call.q.shape[2], call.k.shape[2]))
        return attend_reference(call)

    lower(make_call(q, q, q, Rule(2, stride=8)), note)
    lower(make_call(q[:, :, :1], q, q, Rule(2, stride=8)), note)
    assert lengths == [(8, 8), (1, 8)]


def test_dropout_leaves_each_weight_as_often_as_it_should() -> None:
    torch.manual_seed(0)
    q = torch.zeros(64, 1, 24, 4)
    values = torch.eye(24).expand(64, 1, 24, 24).contiguous()
    rule = Union(Rule(1, stride=2), Rule(1, stride=2, skip=100))
    out = attend(q, q, values, rule, dropout=0.25).out[:, 0, -1]  # twelve keys of weight 1/12
    shown = out[:, 1::2]
    assert torch.equal(shown[shown > 0].unique().round(decimals=5), torch.tensor([1 / 9]).round(decimals=5))
    assert abs(float((shown > 0).float().mean()) - 0.75) < 0.05 and float(out[:, ::2].abs().max()) == 0


def test_bad_arguments_are_refused() -> None:
    for words, build in (
        ("stride is 0; expected a whole number of at least 1, or 2 of them", lambda: Rule(2, stride=0)),
        (r"skip is \[1, 2, 3\]; expected a whole number of at least 0, or 2 of them", lambda: Rule(2, skip=[1, 2, 3])),
        (
            "paper_compat=True counts distances from the previous token, which stride contradicts",
            lambda: Rule(2, stride=2, paper_compat=True),
        ),
        ("a Union was given rules with heads = 2 and 3; expected one value", lambda: Union(Rule(2), Rule(3))),
        ("a Union was given rules with causal = True and False", lambda: Union(Rule(2), Rule(2, causal=False))),
        ("a Union was given sink_tokens in its second rule", lambda: Union(Rule(2), Rule(2, sink_tokens=1))),
        ("a Union was given sink_logits in", lambda: Union(Rule(2), Rule(2, sink_logits=torch.ones(2)))),
        ("a Union was given a int; expected a Rule or a Union", lambda: Union(Rule(2), 3)),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match=words):
            build()
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(ValueError, match="two rules of a Union show the same pair"):
        attend(q, q, q, Union(Rule(2, reach=3), Rule(2, stride=2)), backend="reference")
    with pytest.raises(ValueError, match="distance_bias has shape"):
        attend(q, q, q, Union(Rule(2, reach=3), Rule(2, skip=3, distance_bias=torch.zeros(2, 2))))
    rings = Rings(torch.zeros(1, 9, 4), torch.zeros(1, 9, 4), torch.tensor([9]), torch.tensor([4]))
    with pytest.raises(ValueError, match="rule is of type Union; expected a Rule"):
        attend_rings(q[:, :, :1], rings, Union(Rule(2), Rule(2, reach=0)))
    assert choose_backend(q, q, q, Rule(2, stride=2, sink_tokens=1)) == choose_backend(q, q, q, Rule(2))


class TestBlocks:
    def pair(self, seed: int, heads: tuple[int, int] = (1, 1)) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        masks = []
        for h in heads:
            coarse = torch.rand(h, 5, 5, generator=g) < 0.5
            mask = coarse.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :37, :37]
            masks.append(mask ^ (torch.rand(h, 37, 37, generator=g) < 0.02))
        return masks[0], masks[1]

    @pytest.mark.parametrize("heads", [(1, 1), (3, 1), (1, 3), (3, 3)])
    def test_and_or(self, heads: tuple[int, int]) -> None:
        at = torch.arange(37)
        for seed in range(4):
            a, b = self.pair(seed, heads)
            x, y = BlockIndex.from_dense(a, 8), BlockIndex.from_dense(b, 8)
            assert torch.equal((x & y).visible(at, at), a & b)
            assert torch.equal((x | y).visible(at, at), a | b)

    def test_equal_masks_are_kept_once(self) -> None:
        diagonal = (torch.arange(64)[:, None] >= torch.arange(64)).logical_and(
            torch.arange(64)[:, None] - torch.arange(64) < 8
        )
        x = BlockIndex.from_dense(diagonal, 8)
        assert (x | x).masks.shape[0] == x.masks.shape[0] or (x | x).masks.shape[0] <= 15
        both = x & BlockIndex.from_dense(torch.ones(64, 64, dtype=torch.bool), 8)
        assert torch.equal(both.visible(torch.arange(64), torch.arange(64))[0], diagonal)

    def test_stack_and_pick(self) -> None:
        at = torch.arange(37)
        a, b = self.pair(1)
        x, y = BlockIndex.from_dense(a, 8), BlockIndex.from_dense(b, 8)
        stacked = BlockIndex.stack([x, y, x])
        assert torch.equal(stacked.visible(at, at), torch.cat([a, b, a]))
        assert stacked.columns.numel() == x.columns.numel() + y.columns.numel()
        assert torch.equal(stacked.for_heads([1, 0]).visible(at, at), torch.cat([b, a]))
        rule = Rule(3, blocks=stacked).for_heads([2], [2])
        assert rule.blocks is not None and torch.equal(rule.blocks.visible(at, at), a)
        with pytest.raises(ValueError, match="cannot be stacked; expected one size"):
            BlockIndex.stack([x, BlockIndex.from_dense(a, 16)])


@pytest.mark.parametrize("term", ["span", "dynamic", "key_span"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["native", "banded"])
def test_ramp_that_ends_at_a_distance_that_is_seen(backend: str, dtype: torch.dtype, term: str) -> None:
    """Spans of 16 tokens and a ramp of 8: distance 24 has no weight and its key gives no gradient, in thirds either."""
    made = make(Case(b=2, tq=60, tk=60, d=64, logits=4.0, terms=(term,), spans=(16.0,), stride=(3,)))
    name = "key_span" if term == "key_span" else "span"
    made.inputs[name] = made.inputs[name].round()
    truth, got = run(made, "reference", torch.float64), run(made, backend, dtype)
    worst = truth[f"d{name}"].abs().max()
    torch.testing.assert_close(got[f"d{name}"], truth[f"d{name}"], rtol=0.05, atol=0.05 * float(worst))
