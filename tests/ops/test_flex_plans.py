"""What the flex backend compiles and plans: few variants however lengths and spans drift, none beyond torch's limits,
and one plan for all calls that see the same pairs."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import BlockIndex, Rule
from spanformer.memory.groups import group_heads
from spanformer.ops import Attended
from spanformer.ops.backends import flex
from spanformer.ops.backends.flex_blocks import bucket
from spanformer.ops.backends.flex_plans import MOST, Plans
from spanformer.ops.backends.reference import attend_reference
from spanformer.ops.lower import Call, Lowered, flatten, make_call
from support.small_models import SMALL, make, text, with_attention

# --- variants ---------------------------------------------------------------------------------------------------------


def test_buckets_are_few_and_waste_at_most_half() -> None:
    sizes = {bucket(n) for n in range(1, 8193)}
    assert len(sizes) <= 2 * math.log2(8192) + 1
    assert all(n <= bucket(n) <= 1.5 * n for n in range(1, 8193))
    assert all(bucket(n) == n for n in sizes) and bucket(0) == 1


def test_drifting_spans_and_lengths_meet_few_variants() -> None:
    """20,000 steps without compiling: on CUDA, spans up to 8,192 that wander and tables cut to them; some batches are
    shorter than others."""
    draw, heads, most = random.Random(0), 8, 8192
    spans = [draw.uniform(0, 200) for _ in range(heads)]
    variants, by_whole_blocks = set(), set()
    for _ in range(20_000):
        spans = [min(max(z * math.exp(draw.gauss(0, 0.03)), 1.0), most) for z in spans]
        tq = 512 if draw.random() < 0.9 else draw.randint(1, 512)
        groups = group_heads([math.ceil(z) + 31 for z in spans], most, torch.device("cuda"))
        assert len(groups) == 1
        tk = tq + groups[0][1]
        q, k = (torch.empty(1, heads, t, 64, device="meta") for t in (tq, tk))
        table = torch.empty(heads, math.ceil(max(spans)) + 32, device="meta")
        rule = Rule(heads, span=torch.empty(heads, device="meta"), distance_bias=table)
        variants.add(flex.variant(flatten(Call(q, k, k, 0.125, rule=rule))))
        by_whole_blocks.add((-(-tq // 128), -(-tk // 128)))
    assert len(by_whole_blocks) > 64  # what a limit of 64 kernels would not have survived
    sizes = [len({bucket(n) for n in range(1, tokens // 128 + 1)}) for tokens in (512, 512 + most)]
    assert len(variants) <= sizes[0] * sizes[1] < 64


def a_call(tq: int, tk: int, **terms) -> Lowered:
    g = torch.Generator().manual_seed(tk)
    q, k, v = (torch.randn(1, 2, t, 16, generator=g) for t in (tq, tk, tk))
    return flatten(make_call(q, k, v, Rule(2, **terms)))


def tables(length: int, max_future: int = 0) -> dict:
    g = torch.Generator().manual_seed(length)
    return {
        "distance_bias": torch.randn(2, length, generator=g),
        "distance_vec": torch.randn(1, length, 16, generator=g),
        "causal": not max_future,
        "max_future": max_future,
    }


def pattern(length: int) -> dict:
    seen = torch.rand(length, length, generator=torch.Generator().manual_seed(length)) < 0.5
    return {"blocks": BlockIndex.from_dense(seen, 16)}


DRIFTS = {
    "spans and reaches": [
        a_call(20, tk, span=torch.tensor([tk / 3, 9.0]), ramp=4.0, reach=[30, 50 + tk]) for tk in (130, 200, 256)
    ],
    "causal tables": [a_call(20, tk, **tables(tk)) for tk in (130, 200, 256)],
    "tables that look max_future": [a_call(20, tk, **tables(2 * tk - 1, tk - 1)) for tk in (70, 100, 128)],
    "patterns": [a_call(20, tk, **pattern(tk)) for tk in (220, 230, 240)],
}


@pytest.mark.parametrize("name", DRIFTS)
def test_calls_of_one_variant_compile_once(name: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, calls = CompileCounterWithBackend("eager"), DRIFTS[name]
    assert len({flex.variant(call) for call in calls}) == 1
    for call in calls:
        assert_runs(call, counter)
    assert counter.frame_count == 1


def test_variants_beyond_torchs_limits_compile() -> None:
    """torch counts compilations by code, and each variant has its own."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=3):
        for tk in (100, 200, 300, 400, 600, 900):
            assert_runs(a_call(20, tk, reach=40), counter)
    assert counter.frame_count == 6


@torch.no_grad()
def assert_runs(call: Lowered, backend: object) -> None:
    out, lse = flex.run_public(*flex.plan(call), flex._compiled(flex.variant(call), backend))
    tq = call.q.shape[2]
    torch.testing.assert_close(Attended(out[:, :, :tq], lse[:, :, :tq]), attend_reference(call), atol=1e-5, rtol=1e-5)


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Lowered]:
    """The calls whose block lists are made."""
    calls, lists = [], flex.block_lists
    monkeypatch.setattr(flex, "_plans", Plans())
    monkeypatch.setattr(flex, "block_lists", lambda call, split: calls.append(call) or lists(call, split))
    return calls


def run(rule: Rule, tokens: int = 40, dtype: torch.dtype = torch.float32) -> None:
    """Equal to the reference, whatever was planned before."""
    q, k, v = torch.randn(3, 1, rule.heads, tokens, 16, dtype=dtype)
    call = flatten(make_call(q, k, v, rule))
    torch.testing.assert_close(flex.attend_flex(call), attend_reference(call), atol=1e-5, rtol=1e-5)


def test_equal_reaches_are_planned_once(planned: list[Lowered]) -> None:
    for _ in range(3):
        run(Rule(2, reach=[5, 30]))
    assert len(planned) == 1
    run(Rule(2, reach=[5, 31]))
    run(Rule(2, reach=[5, 30]), tokens=41)
    run(Rule(2, reach=[5, 30], paper_compat=True))
    run(Rule(2, reach=[5, 30], causal=False))
    assert len(planned) == 5


def test_one_tensor_of_spans_is_planned_until_it_is_written(planned: list[Lowered]) -> None:
    span = torch.tensor([3.0, 9.0], requires_grad=True)
    for _ in range(3):
        run(Rule(2, span=span, ramp=4.0))
    assert len(planned) == 1
    with torch.no_grad():
        span += 7.0
    run(Rule(2, span=span, ramp=4.0))
    run(Rule(2, span=span.detach().clone(), ramp=4.0))
    run(Rule(2, span=span, ramp=5.0))
    assert len(planned) == 4


def test_documents_padding_and_patterns_are_told_apart(planned: list[Lowered]) -> None:
    documents, bias = torch.arange(40) // 9, torch.zeros(1, 1, 40)
    blocks = [BlockIndex.from_dense(torch.rand(40, 40) < 0.5, 8) for _ in range(2)]
    hidden = bias.clone()
    hidden[..., :7] = -torch.inf
    rules = [
        Rule(2, documents=documents), Rule(2, documents=documents // 2), Rule(2, key_bias=bias),
        Rule(2, key_bias=hidden), Rule(2, blocks=blocks[0]), Rule(2, blocks=blocks[1]),
    ]  # fmt: skip
    for rule in rules:
        run(rule)
        run(rule)
    assert len(planned) == len(rules)


def test_few_plans_are_kept(planned: list[Lowered]) -> None:
    for _ in range(2):
        for reach in range(1, MOST + 2):
            run(Rule(2, reach=reach))
    assert len(flex._plans._known) == MOST and len(planned) == 2 * (MOST + 1)


def test_plan_made_in_inference_mode_is_not_trained_with(planned: list[Lowered]) -> None:
    with torch.inference_mode():
        run(Rule(2, reach=9))
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    flex.attend_flex(flatten(make_call(q, q, q, Rule(2, reach=9)))).out.sum().backward()
    assert len(planned) == 2 and isinstance(q.grad, Tensor)


def test_layers_with_equal_windows_are_planned_once_a_step(planned: list[Lowered]) -> None:
    config = with_attention(SMALL, kind="window", window=12, backend="flex")
    lm = make(replace(config, layers=3))
    state = lm(text(1, 30)).state
    assert len(planned) == 1
    lm(text(1, 30), state).logits.sum().backward()
    assert len(planned) == 2
