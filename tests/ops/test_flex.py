"""The flex backend in eager mode on the CPU: equal to the float64 oracle in values and gradients, and its block lists,
which eager mode does not read, equal to what the dense visibility asks for."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spanformer import BlockIndex, Rule, attend
from spanformer.ops import Attended
from spanformer.ops.attend import AUTO
from spanformer.ops.backends import flex
from spanformer.ops.backends.flex_blocks import block_cover, padded_length
from spanformer.ops.backends.flex_mods import vec_width
from spanformer.ops.backends.reference import attend_reference, distances, visible_pairs
from spanformer.ops.lower import Call, Lowered, flatten, make_call
from support.cases import LEARNED, TERMS, Case, check, make, run

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
BIG = ("span", "distance_bias", "distance_vec", "key_bias", "documents", "sink_logits", "blocks")


def named(case: Case) -> str:
    return case.name


def a_call(case: Case, dtype: torch.dtype = F32, grad: bool = False) -> tuple[dict[str, Tensor], Lowered]:
    leaves, call = before_lowering(case, dtype, grad)
    return leaves, flatten(call)


def before_lowering(case: Case, dtype: torch.dtype = F32, grad: bool = False) -> tuple[dict[str, Tensor], Call]:
    made = make(case)
    leaves = {name: t.to(dtype).requires_grad_(grad) for name, t in made.inputs.items()}
    options = {name: value for name, value in made.fixed.items() if not name.endswith("_positions")}
    rule = Rule(case.h, **options, **{name: leaves[name] for name in LEARNED if name in leaves})
    where = {name: made.fixed[name] for name in ("q_positions", "k_positions")}
    return leaves, make_call(leaves["q"], leaves["k"], leaves["v"], rule, **where)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", TERMS)
def test_each_term_alone(term: str):
    check(Case(b=2, terms=(term,), reach=(40, 9)), "flex", F32)


@pytest.mark.parametrize("size", [17, 63, 111, 129, 300])
def test_sizes(size: int):
    check(Case(tq=size, tk=size, terms=("span", "distance_bias"), spans=(5.5, 140.0)), "flex", F32)


def test_one_token():
    """One key has all the weight whatever its score, so a dense softmax passes back an exact zero. FlexAttention gets
    there as the difference of two equal sums, added up in different orders: a few units of those sums are left, more
    than `check` allows."""
    made = make(Case(tq=1, tk=1, terms=("span", "distance_bias")))
    truth, got = run(made, "reference", F64), run(made, "flex", F32)
    torch.testing.assert_close(got, truth, atol=2e-6, rtol=2e-6)
    truth, got = run(made, "reference", F64), run(made, "flex", F64)
    torch.testing.assert_close(got, truth, atol=4e-15, rtol=4e-15)


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(b=2, h=4, hkv=2, tq=17, tk=129, terms=BIG),
        Case(
            b=2, h=4, hkv=1, tq=63, tk=63, dv=24, terms=("dynamic", "padding", "head_vec", "sink_logits"), layout="bthd"
        ),
    ],
    ids=named,
)
def test_combined_in_other_dtypes(case: Case, dtype: torch.dtype):
    check(case, "flex", dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(h=6, hkv=2, tq=63, tk=129, terms=("dynamic", "distance_bias", "key_bias", "sink_logits")),
        Case(tq=5, tk=300, terms=BIG),
        Case(tq=20, tk=150, causal=False, terms=("span", "distance_bias", "sink_logits")),
        Case(tq=150, tk=20, causal=False, terms=("span",), reach=(7, 30)),
        Case(paper_compat=True, terms=("span", "distance_vec", "sink_logits"), spans=(0.0, 7.5)),
        Case(paper_compat=True, tq=9, tk=140, terms=("dynamic", "distance_bias"), reach=(8, 64)),
        Case(positions="shuffled", tq=40, tk=130, terms=("span", "distance_bias", "blocks")),
        Case(positions="rows", b=3, tq=40, tk=130, terms=("dynamic", "distance_vec", "documents", "blocks")),
        Case(positions="rows", b=2, causal=False, terms=("span", "blocks")),
        Case(ramp=1.0, terms=("span",), spans=(0.0, 3.0, 2.5), h=3, hkv=3),
        Case(terms=("span", "sink_logits"), spans=(0.0, 8.0, 9.25, 1e6), h=4, hkv=4),
        Case(terms=("span",), logits=9.0, spans=(0.0, 4.0)),
        Case(tq=0, tk=5, terms=("span",)),
    ],
    ids=named,
)
def test_awkward_calls(case: Case):
    check(case, "flex", F32)


@pytest.mark.parametrize("terms", [(), ("span", "sink_logits")], ids=str)
def test_rows_that_see_nothing(terms: tuple[str, ...]):
    case = Case(b=2, tq=17, tk=17, terms=(*terms, "padding"), reach=(0, 3))
    check(case, "flex", F32)
    leaves, call = a_call(case, grad=True)
    out, lse = flex.attend_flex(call)
    nothing = ~visible_pairs(call, distances(call)).any(-1)
    assert nothing.any() and not nothing.all()
    assert (out[nothing] == 0).all()
    sinks = (
        leaves["sink_logits"][None, :, None].expand_as(lse)
        if "sink_logits" in terms
        else torch.full_like(lse, -torch.inf)
    )
    torch.testing.assert_close(lse[nothing], sinks[nothing])
    # −inf in the loss is the caller's; rows of zeros pass nothing on
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True)
    for name, grad in zip(leaves, grads, strict=True):
        assert grad is None or grad.isfinite().all(), name
    assert (grads[0][nothing] == 0).all()


def test_no_keys_and_a_sink_of_no_weight():
    q, none = torch.randn(1, 2, 3, 16, requires_grad=True), torch.zeros(1, 2, 0, 16)
    sinks = torch.tensor([1.0, -torch.inf], requires_grad=True)
    out, lse = attend(q, none, none, Rule(2, causal=False, sink_logits=sinks), backend="flex")
    assert (out == 0).all() and (lse[:, 0] == 1).all() and (lse[:, 1] == -torch.inf).all()
    k = torch.randn(1, 2, 3, 16)
    out, lse = attend(q, k, k, Rule(2, sink_logits=sinks), backend="flex")
    plain = attend(q, k, k, Rule(2), backend="flex")
    torch.testing.assert_close(out[:, 1], plain.out[:, 1])
    grads = torch.autograd.grad(out.sum() + lse.sum(), [q, sinks])
    assert all(g.isfinite().all() for g in grads) and grads[1][1] == 0


def test_lse_is_kept_in_float32_for_half_types():
    _, call = a_call(Case(terms=("span", "sink_logits")), BF16)
    out, lse = flex.attend_flex(call)
    assert out.dtype == BF16 and lse.dtype == F32


@pytest.mark.parametrize("paper_compat", [False, True])
def test_future_keys_have_no_effect(paper_compat: bool):
    case = Case(
        b=2, tq=140, tk=140, paper_compat=paper_compat, terms=("span", "distance_bias", "key_bias"), spans=(3.5, 200.0)
    )
    _, call = a_call(case)
    before, now = flex.attend_flex(call), 70
    q, k, v = call.q.clone(), call.k.clone(), call.v.clone()
    q[:, :, now + 1 :] += 5
    for t in (k, v):
        t[:, :, now + (0 if paper_compat else 1) :] -= 7  # the paper_compat does not see the token itself either
    after = flex.attend_flex(replace(call, q=q, k=k, v=v))
    assert torch.equal(before.out[:, :, : now + 1], after.out[:, :, : now + 1])
    assert torch.equal(before.lse[:, :, : now + 1], after.lse[:, :, : now + 1])
    assert not torch.equal(before.out[:, :, now + 1 :], after.out[:, :, now + 1 :])


def test_visible_nan_reaches_its_rows():
    _, call = a_call(Case(tq=9, tk=9))
    q, k = call.q.clone(), call.k.clone()
    q[0, 0, 4] = torch.nan
    out, lse = flex.attend_flex(replace(call, q=q, k=k))
    assert out[0, 0, 4].isnan().all() and lse[0, 0, 4].isnan()
    assert out.isnan().sum() == 16 and lse.isnan().sum() == 1
    k[0, 1, 6] = torch.nan
    out, _ = flex.attend_flex(replace(call, k=k))
    assert out[0, 1, 6:].isnan().all() and out[0, 1, :6].isfinite().all() and out[0, 0].isfinite().all()


# --- the block mask ---------------------------------------------------------------------------------------------------


def listed(num: Tensor, index: Tensor) -> Tensor:
    """Block lists as a boolean grid."""
    grid = torch.zeros(index.shape, dtype=torch.int32)
    filled = torch.arange(index.shape[-1]) < num[..., None]
    return grid.scatter_add(-1, index.long(), filled.int()) > 0


def tiles(seen: Tensor, fill_queries: bool) -> Tensor:
    """[B, H, nq, nk, 128, 128]; padded keys are hidden, padded queries are whatever suits the question."""
    b, h, tq, tk = seen.shape
    padded = torch.zeros(b, h, padded_length(tq), padded_length(tk), dtype=torch.bool)
    padded[:, :, :tq, :tk] = seen
    if fill_queries:
        padded[:, :, tq:] = True
    return padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4)


BANDS = [
    Case(tq=300, tk=300, h=7, hkv=7, reach=(0, 1, 128, 129, 255, 256, 1000)),  # the farthest pair of two blocks: 255
    Case(tq=300, tk=700, h=5, hkv=5, terms=("span",), ramp=8.0, spans=(0.0, 120.0, 121.0, 248.5, 1e6)),
    Case(tq=1, tk=513, h=3, hkv=3, terms=("span",), reach=(1, 300, 512), spans=(500.0,)),
    Case(tq=256, tk=384, h=4, hkv=4, paper_compat=True, terms=("span",), reach=(1, 128, 254, 255), spans=(300.0,)),
    Case(tq=300, tk=500, h=3, hkv=3, causal=False, terms=("span",), reach=(1, 200, 600), spans=(30.0, 150.0, 500.0)),
    Case(tq=640, tk=640, ramp=1.0, terms=("span",), spans=(127.0, 128.0)),
]
OTHERS = [
    Case(b=2, tq=300, tk=500, terms=("dynamic",), spans=(400.0,), reach=(64, 1000)),
    Case(b=2, tq=400, tk=400, terms=("documents",)),
    Case(b=2, tq=400, tk=400, terms=("documents", "padding"), reach=(64, 400)),
    Case(b=2, h=4, hkv=2, tq=129, tk=500, terms=("span", "blocks", "key_bias"), spans=(200.0, 5.0)),
    Case(tq=300, tk=600, causal=False, terms=("blocks", "documents"), b=2),
    Case(tq=200, tk=400, positions="shuffled", terms=("span", "blocks"), spans=(20.0, 300.0)),
    Case(b=3, tq=200, tk=400, positions="rows", terms=("dynamic", "documents"), spans=(300.0,)),
    Case(b=2, tq=200, tk=400, positions="rows", causal=False, terms=("blocks",), reach=(9, 400)),
]


@pytest.mark.parametrize("case", BANDS + OTHERS, ids=named)
def test_block_lists_and_mask_mod_are_the_dense_visibility(case: Case):
    _, call = a_call(case)
    seen = visible_pairs(call, distances(call))
    (made,) = flex.plan(call)
    dense = flex._flex().create_mask(
        made.mask.closed_mask(), case.b, case.h, *made.block_mask.seq_lengths, device="cpu"
    )
    assert torch.equal(dense[:, :, : case.tq, : case.tk], seen)
    assert not dense[..., case.tk :].any()

    mask = made.block_mask
    partial, full = listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partial & full).any()
    needed, covered = tiles(seen, False).flatten(-2).any(-1), tiles(seen, True).flatten(-2).all(-1)
    assert not (needed & ~(partial | full)).any(), "a visible pair lies in no listed block"
    assert not (full & ~covered).any(), "a full block holds a pair that is not visible"
    if case in BANDS:
        assert torch.equal((partial | full).expand_as(needed), needed), "a block without a visible pair is listed"
        assert torch.equal(full.expand_as(needed), covered & needed)
    for q_num, q_index, of_keys in (
        (mask.q_num_blocks, mask.q_indices, partial),
        (mask.full_q_num_blocks, mask.full_q_indices, full),
    ):
        assert torch.equal(listed(q_num, q_index), of_keys.transpose(-1, -2))


def test_full_blocks_of_patterns_and_documents_are_found():
    blocks = BlockIndex.from_dense(torch.ones(512, 512, dtype=torch.bool), 32)
    q = torch.randn(1, 1, 512, 16)
    some, full, _ = block_cover(flatten(make_call(q, q, q, Rule(1, blocks=blocks))))
    assert torch.equal(some[0, 0], torch.ones(4, 4).tril().bool())
    assert torch.equal(full[0, 0], torch.ones(4, 4).tril(-1).bool())
    documents = torch.tensor([0, 0, 1, 1]).repeat_interleave(128)
    some, full, _ = block_cover(flatten(make_call(q, q, q, Rule(1, documents=documents))))
    assert some.nonzero()[:, 2:].tolist() == [[0, 0], [1, 0], [1, 1], [2, 2], [3, 2], [3, 3]]
    assert full.nonzero()[:, 2:].tolist() == [[1, 0], [3, 2]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_planning_never_waits_for_the_device(causal: bool, dynamic: bool):
    """On the meta device there are no values, so any read of one raises."""

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device="meta")

    ids = torch.zeros(2, 400, dtype=torch.int64, device="meta")
    rule = Rule(
        2,
        causal=causal,
        reach=[3, 500],
        span=rand(2, 2, 200) if dynamic else rand(2),
        distance_bias=rand(2, 400),
        distance_vec=rand(1, 400, 16),
        key_bias=rand(2, 1, 400),
        blocks=BlockIndex.from_dense(torch.rand(400, 400) < 0.5, 16),
    )
    q, k = rand(2, 2, 200, 16), rand(2, 2, 400, 16)
    where = {"q_positions": ids[:, 200:], "k_positions": ids} if causal else {}
    (made,) = flex.plan(flatten(Call(q, k, k, 0.25, rule=rule, q_documents=ids[:, 200:], k_documents=ids, **where)))
    assert made.block_mask.kv_indices.shape == (2, 2, 2, 4)


# --- what it serves, and how it is reached ----------------------------------------------------------------------------


def test_refuses_dropout():
    _, call = before_lowering(Case())
    with pytest.raises(ValueError, match="'flex' cannot serve this call: dropout acts on weights after the softmax"):
        attend(call.q, call.k, call.v, call.rule, dropout=0.1, backend="flex")


def test_refuses_long_distance_vec_with_every_reason():
    _, call = before_lowering(Case(tq=2, tk=1100, terms=("distance_vec",)))
    with pytest.raises(ValueError) as error:
        attend(call.q, call.k, call.v, call.rule, dropout=0.5, backend="flex")
    text = str(error.value)
    assert "distance_vec needs 1100 distances: flex stores q·r[d] for every query, and takes at most 1024" in text
    assert "dropout" in text


@pytest.mark.parametrize("limit", [{"reach": (64, 9)}, {"terms": ("distance_vec", "span")}], ids=str)
def test_long_distance_vec_with_short_reach_is_served(limit: dict):
    case = Case(**{"tq": 2, "tk": 1100, "terms": ("distance_vec",)} | limit)
    check(case, "flex", F32)
    assert vec_width(a_call(case)[1]) == 128


def test_refuses_patterns_of_too_many_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flex, "GRID_CELLS", 10)
    _, call = before_lowering(Case(terms=("blocks",)))
    with pytest.raises(
        ValueError, match=r"blocks of size 16 make a grid of 12 cells; flex takes at most 10, so use larger blocks"
    ):
        attend(call.q, call.k, call.v, call.rule, backend="flex")


def test_refuses_an_empty_batch_and_other_devices():
    q = torch.zeros(0, 2, 5, 16)
    with pytest.raises(ValueError, match="the batch is empty"):
        attend(q, q, q, Rule(2), backend="flex")
    q = torch.zeros(1, 2, 5, 16, device="meta")
    with pytest.raises(ValueError, match="device 'meta': flex runs on CUDA"):
        attend(q, q, q, Rule(2), backend="flex")


def test_refuses_head_sizes_and_dtypes_outside_cuda_limits():
    """Asked directly: there is no such device here."""
    q, v = torch.zeros(1, 2, 5, 8, dtype=F64), torch.zeros(1, 2, 5, 512, dtype=F64)
    assert flex._refuses_sizes(flatten(make_call(q, q, v, Rule(2)))) == [
        "the head size of q and k is 8; FlexAttention's CUDA kernels take 16 to 256",
        "the head size of v is 512; FlexAttention's CUDA kernels take 16 to 256",
        "q has dtype torch.float64; FlexAttention's CUDA kernels sum in float32",
    ]
    for dtype in (F32, torch.float16, BF16):
        q = torch.zeros(1, 2, 5, 96, dtype=dtype)
        assert flex._refuses_sizes(flatten(make_call(q, q, q, Rule(2)))) == []


def test_unusable_says_why(monkeypatch: pytest.MonkeyPatch):
    assert flex.unusable() == []

    def missing():
        raise ImportError("no such module")

    monkeypatch.setattr(flex, "_flex", missing)
    assert flex.unusable() == ["torch.nn.attention.flex_attention cannot be imported (no such module)"]


def test_warns_once_that_the_cpu_is_for_tests(caplog: pytest.LogCaptureFixture):
    flex._warn_dense.cache_clear()
    _, call = a_call(Case())
    with caplog.at_level(logging.WARNING, "spanformer"):
        flex.attend_flex(call)
        flex.attend_flex(call)
    assert [r.message for r in caplog.records if "dense inside" in r.message] == [caplog.records[0].message]
    assert "flex" not in AUTO["cpu"]


def test_importing_spanformer_does_not_import_it():
    names = "'spanformer.ops.backends.flex', 'torch.nn.attention.flex_attention'"
    code = f"import sys, spanformer; print(*(name in sys.modules for name in ({names})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# --- compiled ---------------------------------------------------------------------------------------------------------


def compiled(backend, **options):
    """As on a GPU, with another compiler behind."""
    function = flex._flex().flex_attention
    return torch.compile(function, dynamic=False, fullgraph=True, backend=backend, isolate_recompiles=True, **options)


def test_new_lengths_reaches_and_spans_do_not_compile_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("eager")
    function = compiled(counter)
    for seed, tk in enumerate((130, 130, 141, 256)):
        case = Case(tq=20, tk=tk, seed=seed, reach=(30, 50 + tk), spans=(seed + 1.5, 9.0), terms=("span", "key_bias"))
        _, call = a_call(case)
        with torch.no_grad():
            out, lse = flex.run_public(*flex.plan(call), function)
        truth = attend_reference(call)
        torch.testing.assert_close(Attended(out[:, :, :20], lse[:, :, :20]), truth, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.slow
def test_gradients_through_the_compiled_path(monkeypatch: pytest.MonkeyPatch):
    """What a GPU would trace, forward and backward, run by AOTAutograd's eager interpreter; only the public function's
    refusal of gradients on the CPU is lifted."""
    monkeypatch.setattr(flex._flex(), "_validate_device", lambda *_: None)
    leaves, call = a_call(Case(b=2, h=4, hkv=2, tq=100, tk=130, terms=BIG), F64, grad=True)
    out, lse = flex.run_public(*flex.plan(call), compiled("aot_eager"))
    got = flex._with_sinks(out[:, :, :100], lse[:, :, :100], call.sink_logits)
    truth = attend_reference(call)
    g_out, g_lse = torch.randn_like(truth.out), torch.randn_like(truth.lse)
    grads = [
        torch.autograd.grad((x.out * g_out).sum() + (x.lse * g_lse).sum(), list(leaves.values())) for x in (got, truth)
    ]
    for name, mine, true in zip(leaves, *grads, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"d{name}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(h=4, hkv=2, reach=(64, 130, 4, 1000), spans=(5.5, 40.0, 200.0, 0.0), terms=("span", "distance_bias")),
        Case(b=2, spans=(100.0,), terms=("dynamic", "documents", "distance_vec", "padding")),
        Case(b=2, spans=(100.0,), terms=("span", "blocks", "key_bias"), positions="rows", causal=False),
    ],
    ids=named,
)
def test_compiled_forward_skips_blocks_and_stays_equal(case: Case):
    """Inductor's CPU kernel has no lse, but reads the block lists."""
    case = dataclasses.replace(case, tq=290, tk=600, d=32)
    _, call = a_call(case)
    (made,) = flex.plan(call)
    with torch.no_grad():
        out, _ = flex.run_public(made, compiled("inductor"), lse=False)
    torch.testing.assert_close(out[:, :, : case.tq], attend_reference(call).out, atol=1e-5, rtol=1e-5)
