"""Calls with spans that the flex backend runs in two parts: the ramp's logarithm is computed on the ramp's blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import Rule
from spanformer.ops.backends import flex
from spanformer.ops.backends.flex_blocks import BLOCK, ramp_left
from spanformer.ops.backends.flex_plans import Plans
from spanformer.ops.backends.reference import attend_reference, distances, visible_pairs
from spanformer.ops.lower import Lowered, flatten, make_call
from support.cases import Case, check

EDGES = (0.0, 127.0, 127.5, 128.0, 255.0, 256.25, 1e6)  # spans that end at a block's border, or beside it


@pytest.fixture(autouse=True)
def always_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "SPLIT_FROM", 0)
    monkeypatch.setattr(flex, "_plans", Plans())


def a_call(tq: int, tk: int, **terms) -> Lowered:
    g = torch.Generator().manual_seed(tk)
    heads = len(terms["span"]) if "span" in terms else 2
    q, k, v = (torch.randn(1, heads, t, 16, generator=g) for t in (tq, tk, tk))
    return flatten(make_call(q, k, v, Rule(heads, **terms)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(h=7, hkv=7, tq=300, tk=300, terms=("span",), spans=EDGES, ramp=8.0),
        Case(b=2, h=4, hkv=2, tq=129, tk=400, terms=("dynamic", "distance_bias", "sink_logits"), spans=(300.0,)),
        Case(b=2, tq=260, tk=260, terms=("span", "documents", "key_bias"), spans=(200.0, 3.0)),
        Case(tq=300, tk=500, causal=False, terms=("span",), spans=(130.0, 300.0), reach=(400, 200)),
        Case(tq=140, tk=300, paper_compat=True, terms=("span", "distance_vec"), spans=(128.0, 129.0)),
        Case(b=3, positions="rows", tq=40, tk=300, terms=("dynamic",), spans=(250.0,)),
        Case(b=2, tq=150, tk=300, terms=("span", "padding", "sink_logits"), reach=(0, 290), spans=(200.0,)),
    ],
    ids=lambda case: case.name,
)
def test_two_parts_are_the_whole(case: Case, dtype: torch.dtype) -> None:
    check(case, "flex", dtype)


def test_rows_that_see_nothing_have_no_nan() -> None:
    call = a_call(260, 260, span=torch.tensor([200.0, 0.0]), reach=[0, 3])
    leaves = [t.requires_grad_() for t in (call.q, call.k, call.v, call.span) if t is not None]
    out, lse = flex.attend_flex(call)
    assert (out[:, 0] == 0).all() and (lse[:, 0] == -torch.inf).all()
    grads = torch.autograd.grad(out.square().sum() + lse[:, 1].sum(), leaves)
    assert all(g.isfinite().all() for g in grads)


def blocks_of(seen: Tensor) -> Tensor:
    """Blocks that hold any of these pairs, [1, H, nq, nk]."""
    sides = [-(-n // BLOCK) * BLOCK for n in seen.shape[2:]]
    padded = torch.zeros(*seen.shape[:2], *sides, dtype=torch.bool)
    padded[:, :, : seen.shape[2], : seen.shape[3]] = seen
    return padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(3, 4).flatten(-2).any(-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_each_block_is_in_one_part(causal: bool, dynamic: bool) -> None:
    z = torch.tensor(EDGES)
    span = (z[None, :, None] - torch.arange(384) % 100 / 50).clamp(min=0) if dynamic else z
    q = torch.randn(1, 7, 384, 16)
    call = flatten(make_call(q, q, q, Rule(7, span=span, ramp=8.0, causal=causal)))
    level, ramp = (made.block_mask.to_dense().bool()[:, :, :3, :3] for made in flex.plan(call))
    seen, d = visible_pairs(call, distances(call)), distances(call).abs()
    left = ramp_left(span[..., None] if dynamic else span[None, :, None, None], d, 8.0)
    needed = blocks_of(seen)
    assert not (level & ramp).any() and torch.equal(level | ramp, needed)
    assert torch.equal(ramp, blocks_of(seen & (left < 8.0))) or dynamic
    assert not (level & blocks_of(seen & (left < 8.0))).any()


def test_score_mod_has_the_logarithm_in_the_second_part_only() -> None:
    level, ramp = flex.plan(a_call(20, 300, span=torch.tensor([200.0, 9.0])))
    assert level.score is None and ramp.score is not None
    assert level.block_mask.full_kv_num_blocks is not None and ramp.block_mask.full_kv_num_blocks is None
    level, ramp = flex.plan(a_call(20, 300, span=torch.tensor([200.0, 9.0]), distance_bias=torch.zeros(2, 300)))
    assert level.score is not None and ramp.score is not None
    assert len(level.score.tensors) + 1 == len(ramp.score.tensors)


def test_short_calls_and_calls_without_spans_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "SPLIT_FROM", 256)
    span = torch.tensor([200.0, 9.0])
    parts = [
        len(flex.parts_of(a_call(tq, tk, **terms)))
        for tq, tk, terms in (
            (20, 255, {"span": span}),
            (20, 256, {"span": span}),
            (300, 300, {"span": span, "reach": [255, 9]}),
            (300, 300, {"span": span, "reach": [256, 9]}),
            (300, 300, {}),
        )
    ]
    assert parts == [1, 2, 1, 2, 1]


def test_both_parts_are_planned_once() -> None:
    call = a_call(20, 300, span=torch.tensor([200.0, 9.0]))
    first, second = flex.plan(call), flex.plan(call)
    assert [a.block_mask is b.block_mask for a, b in zip(first, second, strict=True)] == [True, True]


def test_parts_compile_once_each_while_spans_and_lengths_drift() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    for tk in (520, 600, 700):
        call = a_call(20, tk, span=torch.tensor([tk / 2, 9.0]), ramp=4.0)
        with torch.no_grad():
            parts = zip(flex.parts_of(call), flex.plan(call), strict=True)
            done = [flex.run_public(made, flex._compiled(flex.variant(part), counter)) for part, made in parts]
        merged = flex.merge([flex.Attended(out[:, :, :20], lse[:, :, :20]) for out, lse in done])
        torch.testing.assert_close(merged, attend_reference(call), atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 2


def test_growing_contexts_meet_two_variants_an_octave() -> None:
    q, span = torch.empty(1, 2, 1, 64, device="meta"), torch.empty(2, device="meta")
    variants = set()
    for tokens in range(BLOCK, (1 << 20) + 1, BLOCK):
        k = torch.empty(1, 2, 1, 64, device="meta").expand(-1, -1, tokens, -1)
        call = flatten(make_call(q, k, k, Rule(2, span=span)))
        variants |= {flex.variant(part) for part in flex.parts_of(call)}
    assert len(variants) <= 2 * (2 * math.log2((1 << 20) / BLOCK) + 1)


@pytest.mark.slow
def test_gradients_of_both_parts_through_the_compiled_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would trace, run by AOTAutograd's eager interpreter, which reads masks alone."""
    monkeypatch.setattr(flex._flex(), "_validate_device", lambda *_: None)
    call = a_call(140, 300, span=torch.tensor([128.0, 250.0]), ramp=8.0)
    leaves = [t.double().requires_grad_() for t in (call.q, call.k, call.v, call.span) if t is not None]
    call = replace(call, q=leaves[0], k=leaves[1], v=leaves[2], span=leaves[3])
    function = torch.compile(
        flex._flex().flex_attention, dynamic=False, fullgraph=True, backend="aot_eager", isolate_recompiles=True
    )
    done = [flex.run_public(made, function) for made in flex.plan(call)]
    got = flex.merge([flex.Attended(out[:, :, :140], lse[:, :, :140]) for out, lse in done])
    truth = attend_reference(call)
    g = torch.randn_like(truth.out)
    grads = [torch.autograd.grad((x.out * g).sum() + x.lse.sum(), leaves) for x in (got, truth)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-5)
