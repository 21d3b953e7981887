"""Kept keys: seen from everywhere, whatever reach and span say, by every backend as by the dense oracle."""

from __future__ import annotations

import itertools

import pytest
import torch

from spanformer import Rule, attend
from support.cases import Case, check, make, run

CASES = [
    Case(tq=33, tk=33, sink_tokens=4, reach=(3, 9)),
    Case(tq=33, tk=33, sink_tokens=4, terms=("span",), spans=(0.5, 6.0)),
    Case(tq=63, tk=129, sink_tokens=3, h=4, hkv=2, b=2, terms=("span", "sink_logits"), reach=(7, 70)),
    Case(tq=17, tk=40, sink_tokens=5, b=2, terms=("dynamic", "padding")),
    Case(tq=17, tk=17, sink_tokens=40, terms=("span", "key_bias")),
    Case(tq=1, tk=33, sink_tokens=1, terms=("span",), paper_compat=True),
    Case(tq=21, tk=21, sink_tokens=2, b=2, terms=("span", "documents")),
    Case(tq=21, tk=21, sink_tokens=2, causal=False, reach=(4,)),
    Case(tq=19, tk=31, sink_tokens=6, b=3, positions="rows", terms=("span", "key_bias")),
    Case(tq=19, tk=31, sink_tokens=6, positions="shuffled", terms=("span",)),
    Case(tq=33, tk=33, sink_tokens=4, dropout=0.3, terms=("span",)),
]


@pytest.mark.parametrize("backend", ["native", "banded"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_equals_the_oracle(case: Case, backend: str) -> None:
    check(case, backend)


def test_flex_serves_it_too() -> None:
    made = make(CASES[1])
    inputs = {name: t.float() for name, t in made.inputs.items()}
    rule = Rule(2, sink_tokens=4, ramp=8.0, span=inputs["span"])
    qkv = [inputs[n] for n in "qkv"]
    with torch.no_grad():
        torch.testing.assert_close(attend(*qkv, rule, backend="flex").out, attend(*qkv, rule, backend="reference").out)


def test_oracle_sees_only_sink_tokens_beyond_the_reach() -> None:
    q, k, v = torch.zeros(1, 1, 9, 4), torch.zeros(1, 1, 9, 4), torch.eye(9)[None, None]
    weights = attend(q, k, v, Rule(1, reach=2, sink_tokens=3), backend="reference").out[0, 0]
    for i, j in itertools.product(range(9), range(9)):
        seen = j <= i and (i - j < 2 or j < 3)
        assert (weights[i, j] > 0) == seen, (i, j)


def test_packed_documents_each_keep_their_own_first_tokens() -> None:
    q, k = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4)
    v, place = torch.eye(8)[None, None], torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    rule = Rule(1, reach=1, sink_tokens=1, documents=torch.tensor([7, 7, 7, 7, 9, 9, 9, 9]))
    for backend in ("reference", "native", "banded"):
        weights = attend(q, k, v, rule, backend=backend, q_positions=place, k_positions=place).out[0, 0]
        assert (weights > 0).nonzero().tolist() == [
            [0, 0], [1, 0], [1, 1], [2, 0], [2, 2], [3, 0], [3, 3], [4, 4], [5, 4], [5, 5],
            [6, 4], [6, 6], [7, 4], [7, 7]
        ]  # fmt: skip


def test_sum_of_rules_has_more_sink_tokens() -> None:
    assert (Rule(2, sink_tokens=3) + Rule(2, sink_tokens=5)).sink_tokens == 5
    assert (Rule(2, sink_tokens=3) + Rule(2)).sink_tokens == 3


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"sink_tokens is -1; expected a whole number of tokens"):
        Rule(2, sink_tokens=-1)
    with pytest.raises(ValueError, match=r"sink_tokens is 2 beside distance_bias, .* drop one of them"):
        Rule(2, sink_tokens=2, distance_bias=torch.zeros(2, 9))


def test_cases_depend_on_sink_tokens() -> None:
    made = make(CASES[0])
    without = Rule(2, reach=[3, 9])
    qkv = [made.inputs[n] for n in "qkv"]
    assert not torch.allclose(
        attend(*qkv, without, backend="reference").out, run(made, "reference", torch.float64)["out"]
    )
