"""Awkward arguments of attend and Rule: the right result, or one sentence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanformer import Rings, Rule, attend, attend_rings
from support.cases import Case, check

BACKENDS = ("native", "banded", "reference")
EAGER = ("native", "banded")


def negated(t: Tensor) -> Tensor:
    """The same numbers, by a view whose memory holds them with the other sign, as `x.conj().imag` is."""
    view = torch._neg_view(-t)
    assert view.is_neg()
    return view


@pytest.mark.parametrize("name", ["q", "k", "v", "span", "sink_logits", "key_bias", "q_positions", "documents"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_bit_views(backend: str, name: str) -> None:
    g = torch.Generator().manual_seed(0)
    given = {n: torch.randn(1, 2, 20, 8, generator=g) for n in ("q", "k", "v")}
    given |= {"span": torch.tensor([3.0, 5.5]), "sink_logits": torch.randn(2), "key_bias": torch.randn(1, 1, 20)}
    given |= {
        "q_positions": torch.arange(20).flip(0),
        "k_positions": torch.arange(20),
        "documents": torch.arange(20) // 9,
    }

    def run(**changed: Tensor):
        x = given | changed
        terms = {n: x[n] for n in ("span", "sink_logits", "key_bias", "documents")}
        positions = {n: x[n] for n in ("q_positions", "k_positions")}
        return attend(x["q"], x["k"], x["v"], Rule(2, ramp=4.0, **terms), backend=backend, **positions)

    torch.testing.assert_close(run(**{name: negated(given[name])}), run())


def test_negative_bit_gradients() -> None:
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    grads = []
    for turn in (negated, lambda t: t):
        out, lse = attend(q, q, q, Rule(2), backend="native")
        given = [turn(t) for t in (torch.ones_like(out), torch.ones_like(lse))]
        grads.append(torch.autograd.grad((out, lse), q, given)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", EAGER)
def test_negative_bit_queries_of_rings(backend: str) -> None:
    q, new, rule = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8), Rule(2, sink_logits=torch.randn(2), reach=8)
    found = []
    for turn in (negated, lambda t: t):
        keys = torch.zeros(1, 16, 8)
        rings = Rings(keys, keys.clone(), torch.tensor([8, 8]), torch.tensor([7]))
        found.append(attend_rings(turn(q), rings, rule, new=(turn(new), turn(new)), backend=backend))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("view", [negated, lambda t: t.mT.contiguous().mT], ids=["negative bit", "transposed"])
def test_rings_that_are_views(view) -> None:
    """The kernel would write to a copy of them."""
    q, keys, rule = torch.randn(1, 2, 1, 8), torch.randn(1, 16, 8), Rule(2, reach=8)
    plain, viewed = (Rings(t, t, torch.tensor([8, 8]), torch.tensor([7])) for t in (keys, view(keys)))
    with pytest.raises(ValueError, match=r"keys has strides .*; the native kernel takes contiguous rows"):
        attend_rings(q, viewed, rule, backend="native")
    torch.testing.assert_close(attend_rings(q, viewed, rule), attend_rings(q, plain, rule))


@pytest.mark.parametrize("ramp", [1e-30, 1e-5, 0.5, 1e30])
@pytest.mark.parametrize("term", ["span", "dynamic", "key_span"])
@pytest.mark.parametrize("backend", EAGER)
def test_short_and_long_ramps(backend: str, term: str, ramp: float) -> None:
    for spans in ((5.0, 9.0), (5.5, 9.25)):
        check(Case(tq=40, tk=40, terms=(term,), spans=spans, ramp=ramp), backend)
        check(Case(tq=40, tk=40, terms=(term,), spans=spans, ramp=ramp, positions="shuffled"), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_key_spans_with_a_short_ramp(backend: str) -> None:
    """A key of span 5 has full weight at distance 5, however short the ramp."""
    q = torch.zeros(1, 1, 300, 1)
    rule = Rule(1, key_span=torch.full((1, 1, 300), 5.0), ramp=1e-30)
    out = attend(q, q, torch.arange(300.0).view(1, 1, 300, 1), rule, backend=backend).out.flatten()
    torch.testing.assert_close(out[5:], torch.arange(2.5, 297.5))


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"ramp": 1e-46}, r"ramp is 1e-46; expected a positive, finite number of tokens, 1e-38 … 1e\+38"),
        ({"ramp": 1e39}, "ramp is 1e\\+39; expected a positive, finite number"),
        ({"sink_tokens": 1.5}, "sink_tokens is 1.5; expected a whole number of tokens, 0 or more"),
        ({"max_future": 0.5, "causal": False}, "max_future is 0.5; expected a whole number of distances"),
        ({"heads": 2.0}, "heads is 2.0; expected a whole number of heads, 1 or more"),
    ],
    ids=str,
)
def test_numbers_of_a_rule(terms: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule(**{"heads": 1, **terms})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q_positions", "k_positions"])
def test_positions_as_a_list(name: str, backend: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    positions = {"q_positions": torch.arange(4), "k_positions": torch.arange(4)} | {name: [0, 1, 2, 3]}
    with pytest.raises(ValueError, match=f"{name} is a list; expected a tensor of integers"):
        attend(q, q, q, Rule(1), backend=backend, **positions)


@pytest.mark.parametrize("at", [1 << 62, -(1 << 62), 1 << 39])
def test_positions_whose_distances_overflow(at: int) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=rf"k_positions holds {at}; expected positions between −2\^39 and 2\^39"):
        attend(q, q, q, Rule(1), q_positions=torch.arange(4), k_positions=torch.tensor([0, 1, 2, at]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", EAGER)
def test_positions_as_far_as_they_may_be(backend: str, causal: bool) -> None:
    far = (1 << 39) - 1
    q = torch.randn(1, 1, 3, 8)
    q_positions, k_positions = torch.tensor([-far, 0, far]), torch.tensor([far, 1, -far])
    rules = (Rule(1, causal=causal), Rule(1, causal=causal, reach=10), Rule(1, causal=causal, span=torch.tensor([9.0])))
    for rule in rules:
        got, true = (
            attend(q, q, q, rule, backend=b, q_positions=q_positions, k_positions=k_positions)
            for b in (backend, "reference")
        )
        torch.testing.assert_close(got, true)


@pytest.mark.parametrize("backend", EAGER)
def test_document_ids_that_are_hashes_beside_a_stride(backend: str) -> None:
    """2^62 times a stride of 4 is 0 in 64 bits."""
    q = torch.randn(1, 1, 12, 8)
    rule = Rule(1, stride=4, documents=torch.tensor([0, 1 << 62] * 6))
    shuffled = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    positions = {"q_positions": shuffled, "k_positions": shuffled}
    got, true = (attend(q, q, q, rule, backend=b, **positions) for b in (backend, "reference"))
    torch.testing.assert_close(got, true)


@pytest.mark.parametrize("sinks", [None, [0.5, -math.inf]])
@pytest.mark.parametrize("backend", EAGER)
def test_no_keys_give_every_term_a_gradient_of_zeros(backend: str, sinks: list[float] | None) -> None:
    grads = {}
    for name in (backend, "reference"):
        inputs = [torch.ones(1, 2, n, 8, requires_grad=True) for n in (3, 0, 0)]
        span = torch.tensor([3.0, 5.0], requires_grad=True)
        sink = None if sinks is None else torch.tensor(sinks, requires_grad=True)
        out, lse = attend(*inputs, Rule(2, causal=False, span=span, sink_logits=sink), backend=name)
        seen = lse > -math.inf
        learned = [*inputs, span, *([] if sink is None else [sink])]
        grads[name] = torch.autograd.grad(out.sum() + torch.where(seen, lse, 0).sum(), learned)
    torch.testing.assert_close(grads[backend], grads["reference"])


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize(
    "case",
    [
        Case(tq=20, tk=33, d=256, causal=False, stride=(2,), terms=("clipped_value", "sink_logits")),
        Case(tq=20, tk=33, d=256, causal=False, max_future=True, stride=(2,), dropout=0.2, terms=("distance_value",)),
        Case(tq=300, tk=300, d=8, causal=False, max_future=True, terms=("distance_value",)),
    ],
    ids=lambda case: case.name,
)
def test_values_by_distance_at_the_largest_head_size(backend: str, case: Case) -> None:
    """Shaw's values are attended to as more columns of the values: the kernel takes 256."""
    check(case, backend)
