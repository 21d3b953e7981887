"""Chunked attention against the dense reference: any rule, every gradient, and no more than a chunk in memory."""

from __future__ import annotations

import pytest
import torch

from spanformer import Rule, attend
from spanformer.attention import AdaptiveSpan, Chunked, Mixed, View, Window
from support.cases import Case, make, run
from support.memory_use import Largest

CASES = [
    Case(tq=1, tk=1),
    Case(b=2, h=4, hkv=2, tq=63, tk=111, terms=("span", "sink_logits", "distance_bias", "key_bias")),
    Case(b=2, tq=63, tk=111, terms=("dynamic", "padding", "distance_vec"), causal=False),
    Case(b=2, tq=40, tk=70, terms=("key_span", "forget", "documents", "sink_logits"), positions="rows"),
    Case(tq=63, tk=63, terms=("blocks", "distance_value"), reach=(9, 70)),
    Case(tq=63, tk=63, sink_tokens=3, reach=(9, 20), positions="shuffled", terms=("sink_logits",)),
    Case(tq=63, tk=63, paper_compat=True, terms=("span", "distance_vec")),
]


def by_chunks(q, k, v, rule, *, backend, dropout, generator, q_positions, k_positions):
    if backend == "reference":
        return attend(q, k, v, rule, backend=backend, q_positions=q_positions, k_positions=k_positions)
    mechanism = Chunked(Window(rule.heads, 1), queries=16, keys=24)
    return mechanism(q, k, v, rule, View(q_positions=q_positions, k_positions=k_positions))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_chunked_equals_the_dense_reference(case) -> None:
    made = make(case)
    truth = run(made, "reference", torch.float64, by_chunks)
    got = run(made, "chunked", torch.float64, by_chunks)
    for name in truth:
        torch.testing.assert_close(got[name], truth[name], rtol=1e-8, atol=1e-9, msg=name)


def test_no_tensor_of_all_pairs_in_forward_or_backward() -> None:
    heads, length, d = 2, 512, 8
    q = torch.randn(1, heads, length, d, requires_grad=True)
    mechanism = Chunked(Window(heads, length), queries=32, keys=64)
    with Largest() as seen:
        mechanism(q, q, q, mechanism.rule(View()), View()).out.sum().backward()
    assert seen.most <= 2 * heads * length * d  # while all pairs are heads · length², 32 times as many


def test_head_groups_future_and_dropout() -> None:
    inner = Mixed([AdaptiveSpan(1, 32, ramp=3, init=0.2), AdaptiveSpan(1, 32, ramp=9, init=0.5)])
    mechanism = Chunked(inner, queries=8, keys=8).double()
    q, k = (torch.randn(2, 2, 50, 4, dtype=torch.float64) for _ in range(2))
    rule = mechanism.rule(View())
    before = mechanism(q, k, k, rule, View()).out
    torch.testing.assert_close(before, inner(q, k, k, rule, View()).out)
    k[:, :, 30:] += 1
    assert torch.equal(mechanism(q, k, k, rule, View()).out[:, :, :30], before[:, :, :30])
    ones = torch.ones(1, 2, 200, 4)
    wide = Rule(2)
    kept = Chunked(Window(2, 1), queries=8, keys=8)
    kept.dropout = 0.4
    totals = kept(ones, ones, ones, wide, View()).out[..., 0]
    assert float(totals.mean()) == pytest.approx(1, abs=0.05) and float(totals.std()) > 0.02
    torch.testing.assert_close(kept.eval()(ones, ones, ones, wide, View()).out, ones)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="queries is 0 and keys 1024; expected chunks of at least 1"):
        Chunked(Window(2, 5), queries=0)
    with pytest.raises(
        ValueError,
        match="Chunked has its own `forward` or memory; Chunked needs a mechanism that only has a rule",
    ):
        Chunked(Chunked(Window(2, 5)))
    with pytest.raises(ValueError, match="the paper's code has no Chunked"):
        Chunked(Window(2, 5, paper_compat=True))
