"""Tables over distances: signed ones, values by distance and scales, on every backend; and how rules that carry them
add up."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from spanformer import Rule, Union, attend, choose_backend
from support.cases import Case, check

F64 = torch.float64
SIGNED = {"causal": False, "max_future": True}
TABLES = ("distance_bias", "distance_vec", "head_vec")
CASES = [
    *(Case(tq=t, tk=t, terms=(term,), **SIGNED) for term in TABLES for t in (2, 63, 129)),
    Case(b=2, h=4, hkv=2, tq=111, tk=111, terms=("span", "distance_bias", "distance_vec", "key_bias"), **SIGNED),
    Case(b=2, tq=40, tk=111, dv=24, terms=("dynamic", "head_vec", "sink_logits"), **SIGNED),
    Case(b=2, tq=70, tk=111, terms=("distance_bias", "documents"), reach=(3, 60), **SIGNED),
    Case(b=2, tq=33, tk=63, terms=("distance_bias", "blocks"), **SIGNED),
    *(
        Case(b=2, tq=33, tk=63, positions=positions, terms=terms, **SIGNED)
        for positions in ("shuffled", "rows")
        for terms in (("span", "distance_bias"), ("dynamic", "distance_bias"), ("span", "head_vec", "distance_bias"),
                      ("dynamic", "distance_vec"))
    ),
    Case(b=2, tq=33, tk=63, positions="rows", reach=(5, 9), terms=("distance_bias", "padding"), **SIGNED),
    Case(tq=300, tk=300, terms=("span", "distance_bias", "distance_vec"), dropout=0.3, **SIGNED),
]  # fmt: skip
VALUES = [
    *(Case(tq=t, tk=t, terms=(term,)) for term in ("distance_value", "head_value") for t in (1, 4, 63, 129)),
    Case(b=2, h=4, hkv=2, tq=17, tk=63, dv=24, terms=("distance_value", "span", "sink_logits", "distance_bias")),
    Case(tq=63, tk=63, terms=("head_value", "dynamic", "padding"), b=2, paper_compat=True),
    Case(tq=63, tk=63, terms=("distance_value", "documents", "sink_logits"), b=2, dropout=0.3),
    Case(tq=40, tk=40, terms=("distance_value", "span"), causal=False, reach=(3, 30)),
    Case(tq=40, tk=40, terms=("distance_value", "blocks"), causal=False),
    Case(tq=21, tk=30, terms=("distance_value", "span", "sink_logits"), **SIGNED),
    Case(tq=21, tk=30, terms=("clipped_value",), causal=False),
    Case(tq=63, tk=63, b=2, terms=("clipped_value", "span", "sink_logits", "documents"), causal=False, dropout=0.3),
    Case(tq=63, tk=63, b=2, terms=("clipped_value", "padding"), causal=False, reach=(2, 40)),
    Case(b=2, tq=9, tk=2, terms=("clipped_value",), causal=False, reach=(7,), union_stride=4),  # more queries than keys
    *(
        Case(b=2, tq=17, tk=40, positions=positions, terms=("distance_value", "span", "key_bias"))
        for positions in ("shuffled", "rows")
    ),
    Case(b=2, tq=17, tk=40, positions="rows", terms=("clipped_value", "span"), causal=False, spans=(5.5, 12.0)),
]
SCALES = [
    *(Case(tq=t, tk=t, terms=("distance_scale",)) for t in (1, 63, 129)),
    Case(
        b=2, h=4, hkv=2, tq=40, tk=111, terms=("distance_scale", "span", "distance_bias", "distance_vec", "sink_logits")
    ),
    Case(b=2, tq=63, tk=63, terms=("distance_scale", "dynamic", "padding"), causal=False, dropout=0.3),
    Case(b=2, tq=63, tk=63, terms=("distance_scale", "distance_value", "head_vec", "documents"), **SIGNED),
    Case(b=2, tq=17, tk=40, positions="rows", terms=("distance_scale", "span", "head_vec"), **SIGNED),
    Case(tq=17, tk=40, positions="shuffled", terms=("distance_scale", "span"), paper_compat=True),
]


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_signed_tables_equal_the_oracle(case: Case, backend: str) -> None:
    check(case, backend)


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("case", VALUES, ids=lambda c: c.name)
def test_values_by_distance_equal_the_oracle(case: Case, backend: str) -> None:
    check(case, backend, factor=12.0)  # up to three attentions add up where the dense run has one


@pytest.mark.parametrize("case", SCALES, ids=lambda c: c.name)
def test_scales_equal_the_oracle(case: Case) -> None:
    check(case, "banded")


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("stride", [(3,), (1, 4)], ids=str)
def test_with_strides_and_skips(stride: tuple[int, ...], backend: str) -> None:
    base = {"b": 2, "tq": 33, "tk": 63, "stride": stride, "skip": (0, 2)}
    for terms, kind in (
        (("distance_bias", "head_vec"), SIGNED),
        (("distance_value", "span", "sink_logits"), {}),
        (("clipped_value", "span"), {"causal": False}),
        (("distance_value", "distance_vec"), {"tq": 2}),
    ):
        check(Case(**{**base, "terms": terms, **kind}), backend, factor=12.0)
    for kind in ({}, SIGNED):
        check(Case(**base, terms=("distance_scale", "head_vec"), **kind), "banded")


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("case", [CASES[9], VALUES[8], VALUES[-1]], ids=lambda c: c.name)
def test_in_bfloat16(case: Case, backend: str) -> None:
    check(case, backend, torch.bfloat16)


FLEX = [case for case in (*CASES, *VALUES, *SCALES) if not case.dropout and case.tq in (17, 21)]
FLEX += [case for case in (*CASES, *SCALES) if case.tq in (33, 40)]


@pytest.mark.parametrize("case", FLEX, ids=lambda c: c.name)
def test_flex_equals_the_oracle(case: Case) -> None:
    check(case, "flex", factor=12.0)


def test_auto_takes_the_next_where_native_refuses() -> None:
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in range(3))
    rule = Rule(2, distance_scale=torch.ones(2, 20))
    assert choose_backend(q, k, v, rule) == "banded"
    assert choose_backend(q, k, v, Rule(2, distance_value=torch.ones(1, 3, 16))) != "reference"
    with pytest.raises(ValueError, match="the native kernel does not support distance_scale"):
        attend(q, k, v, rule, backend="native")


def test_distance_value_builds_no_tensor_of_all_pairs() -> None:
    """4,096 tokens in the memory of a few times q: a dense 4096 × 4096 matrix alone is 64 times as large as v."""
    q, k, v = (torch.randn(1, 1, 4096, 16, requires_grad=True) for _ in range(3))
    rule = Rule(1, reach=64, distance_value=torch.randn(1, 17, 16, requires_grad=True))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    with Watch():
        attend(q, k, v, rule, backend="banded").out.sum().backward()
    assert largest <= 1 << 20  # ROOM of the banded backend


# ---- adding


def value_at(rule: Rule, name: str, d: int) -> torch.Tensor:
    """What a rule's table says at distance d, by the words of its docstring."""
    table = getattr(rule, name)
    ahead = table.shape[1] // 2 if rule.max_future and name == "distance_value" else rule.max_future
    at = d if rule.causal else d + ahead if ahead else abs(d)
    if name == "distance_value":
        at = min(max(at, 0), table.shape[1] - 1)
    assert 0 <= at < table.shape[1]
    return table[:, at]


def rules(seed: int) -> list[Rule]:
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    made = []
    for ahead, length in ((0, 6), (4, 9), (3, 12), (0, 5)):
        made.append(
            Rule(2, causal=False, max_future=ahead, distance_bias=rand(2, length), distance_scale=rand(2, length))
        )
        made.append(Rule(2, causal=False, max_future=ahead, distance_vec=rand(1, length, 3)))
        made.append(Rule(2, causal=False, max_future=ahead, distance_value=rand(2, length // 2 * 2 + 1, 3)))
    return made


@pytest.mark.parametrize("causal", [False, True])
def test_sum_of_rules_adds_tables_at_every_distance(causal: bool) -> None:
    for a, b in itertools.product(rules(0), rules(1)[:6]):
        both = a + b + Rule(2) if causal else a + b
        again = Rule(2) + b + a if causal else b + a
        for name in ("distance_bias", "distance_vec", "distance_value", "distance_scale"):
            for d in range(0 if causal else -3, 5):
                parts = [value_at(rule, name, d) for rule in (a, b) if getattr(rule, name) is not None]
                if not parts:
                    assert getattr(both, name) is None
                    continue
                expected = math.prod(parts) if name == "distance_scale" else sum(parts)
                torch.testing.assert_close(value_at(both, name, d), expected.expand_as(value_at(both, name, d)))
                torch.testing.assert_close(value_at(again, name, d), expected.expand_as(value_at(again, name, d)))


def test_distance_value_extends_beyond_its_ends_in_a_sum() -> None:
    short, long = (Rule(1, causal=False, max_future=n, distance_value=torch.randn(1, 2 * n + 1, 2)) for n in (1, 4))
    both = short + long
    assert both.max_future == 4 and both.distance_value.shape[1] == 9
    for d in range(-9, 10):
        expected = value_at(short, "distance_value", d) + value_at(long, "distance_value", d)
        torch.testing.assert_close(value_at(both, "distance_value", d), expected)


def test_heads_are_picked_from_tables() -> None:
    rule = Rule(4, distance_scale=torch.arange(8.0).view(4, 2), distance_value=torch.arange(8.0).view(4, 2, 1))
    part = rule.for_heads([3, 1], [3, 1])
    assert part.distance_scale.tolist() == [[6, 7], [2, 3]] and part.distance_value[:, 0, 0].tolist() == [6, 2]


@pytest.mark.parametrize("causal", [True, False])
def test_tables_hold_for_both_parts_of_a_union(causal: bool) -> None:
    """Near keys, and every third of the far ones: one softmax, one set of tables."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=F64, requires_grad=True)  # noqa: E731
    q, k, v, values, scales = rand(1, 2, 21, 4), rand(1, 2, 21, 4), rand(1, 2, 21, 4), rand(1, 5, 4), rand(2, 41)
    seen = Union(Rule(2, causal=causal, reach=4), Rule(2, causal=causal, stride=3, skip=4))
    tables = {"distance_value": values, "distance_scale": scales}
    rule = seen + Rule(2, causal=False, max_future=20, **tables)
    assert [leaf.distance_value is None for leaf in rule.leaves()] == [False, True]
    got, truth = (attend(q, k, v, rule, backend=backend).out for backend in ("banded", "reference"))
    torch.testing.assert_close(got, truth, rtol=1e-10, atol=1e-12)
    d = torch.arange(21)[:, None] - torch.arange(21)
    there = (d.abs() < 4) | (d % 3 == 0)
    there = there & (d >= 0) if causal else there
    score = torch.relu(q @ k.mT / 2) * scales[:, d + 20]
    weight = torch.where(there, score, -math.inf).softmax(-1)
    expected = weight @ v + torch.einsum("bhij,ijd->bhid", weight, values[0, (d + 2).clamp(0, 4)])
    torch.testing.assert_close(truth, expected, rtol=1e-10, atol=1e-12)
    leaves, g_out = (q, k, v, values, scales), torch.randn_like(got)
    grads = (torch.autograd.grad(x, leaves, g_out, retain_graph=True) for x in (got, expected))
    for mine, true in zip(*grads, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule(2, max_future=-1), "max_future is -1; expected a whole number of distances, 0 or more"),
        (
            lambda: Rule(2, max_future=3),
            "max_future is 3 with causal=True, which never sees the future. Tables of a causal rule begin at "
            "distance 0: pass max_future=0",
        ),
        (
            lambda: Rule(2, causal=False, max_future=3, distance_bias=torch.zeros(2, 3)),
            r"distance_bias has shape \[2, 3\] and max_future is 3; expected an entry for distance 0, so at least "
            "4 entries",
        ),
        (
            lambda: Rule(2, causal=False, max_future=3, distance_value=torch.zeros(1, 4, 2)),
            r"distance_value has shape \[1, 4, 2\] and max_future is 3; expected an odd number of entries, with "
            "distance 0 "
            "in the middle",
        ),
        (
            lambda: (
                Rule(1, causal=False, max_future=1, distance_bias=torch.zeros(1, 3))
                + Rule(1, causal=False, distance_bias=torch.zeros(1, 1))
            ),
            "a table of one entry, for distance 0, cannot be added to a rule that sees the future; make it longer",
        ),
        (
            lambda: Rule(2, distance_scale=torch.zeros(1, 3)),
            r"distance_scale has shape \[1, 3\].*expected \[2, L\], L at least 1",
        ),
        (
            lambda: Rule(2, distance_value=torch.zeros(2, 3)),
            r"distance_value has shape .*expected \[1 or 2, L, Dv\], L at least 1",
        ),
        (lambda: Rule(2, distance_value=[1]), "distance_value is a list; expected a tensor"),
        (
            lambda: Rule(2, sink_tokens=1, distance_scale=torch.zeros(2, 3)),
            "sink_tokens is 1 beside distance_scale, which limits distances or positions; a sink token may be at any "
            "distance, so drop one of them",
        ),
        (
            lambda: Rule(1, distance_value=torch.zeros(1, 3, 4)) + Rule(1, distance_value=torch.zeros(1, 3, 5)),
            "distance_value of shapes .* cannot be added; expected one head size",
        ),
    ],
)
def test_tables_bad_rules(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            Rule(1, causal=False, max_future=2, distance_bias=torch.zeros(1, 8)),
            r"distance_bias has shape \[1, 8\], distances -2 … 5; heads here reach 4 tokens of the future, so "
            "max_future "
            "must be at least 4",
        ),
        (
            Rule(1, causal=False, max_future=4, distance_vec=torch.zeros(1, 8, 3)),
            r"distance_vec has shape \[1, 8, 3\], distances -4 … 3; heads here reach 5 distances, so it needs at "
            "least 5",
        ),
        (
            Rule(1, distance_scale=torch.zeros(1, 4)),
            r"distance_scale has shape \[1, 4\], distances 0 … 3; heads here reach 5 distances, so it needs at least 5",
        ),
        (
            Rule(1, distance_value=torch.zeros(1, 4, 2)),
            r"distance_value has shape \[1, 4, 2\]; expected head size 3 as its last axis",
        ),
    ],
)
def test_tables_bad_calls(rule: Rule, message: str) -> None:
    q, k, v = (torch.randn(1, 1, 5, 3) for _ in range(3))
    with pytest.raises(ValueError, match=f"^{message}$"):
        attend(q, k, v, rule)


@pytest.mark.slow
def test_tables_compiled_equal_eager() -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v, vectors, values, biases = (
        torch.randn(*shape, generator=g, requires_grad=True)
        for shape in ((1, 2, 20, 16), (1, 2, 20, 16), (1, 2, 20, 16), (1, 39, 16), (1, 5, 16), (2, 20))
    )

    def run() -> torch.Tensor:
        signed = Rule(2, causal=False, max_future=19, distance_vec=vectors, distance_value=values)
        rule = Rule(2, causal=False) + signed + Rule(2, causal=False, distance_bias=biases)
        return attend(q, k, v, rule, backend="native").out

    traced = torch.compile(run, backend="aot_eager", fullgraph=True)
    for plain, same in zip(
        *(_with_gradients(f(), q, k, v, vectors, values, biases) for f in (run, traced)), strict=True
    ):
        torch.testing.assert_close(same, plain)


def _with_gradients(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]
