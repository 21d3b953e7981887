"""The native CPU kernel against the float64 oracle: every term, every gradient, on awkward sizes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanformer import Rule, attend
from spanformer.ops import kernel
from support.cases import LEARNED, Case, check, make, run
from support.cases import TERMS as PLAIN

pytestmark = pytest.mark.skipif(kernel.problem() is not None, reason=f"native: {kernel.problem()}")

SIZES = (1, 15, 16, 17, 63, 111, 129)
TERMS = (*PLAIN, "key_span", "head_key_span")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sizes(size: int, dtype: torch.dtype) -> None:
    check(Case(tq=size, tk=size, d=size, terms=("span",)), "native", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("term", TERMS)
def test_each_term(term: str, dtype: torch.dtype) -> None:
    check(Case(b=2, h=4, hkv=2, tq=63, tk=129, d=24, terms=(term,)), "native", dtype)


@pytest.mark.parametrize("positions", ["implicit", "shuffled", "rows"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("term", TERMS)
def test_each_term_at_each_position(term: str, causal: bool, positions: str) -> None:
    check(Case(b=2, h=4, hkv=2, tq=111, tk=129, causal=causal, positions=positions, terms=(term,)), "native")


CASES = {
    "plain": Case(tq=500, tk=500, d=64),
    "span": Case(tq=500, tk=500, d=64, terms=("span",), spans=(0, 40, 100.25, 999), h=4, hkv=4),
    "spans below 0": Case(tq=200, tk=200, terms=("span",), spans=(-3.5, -8.0, 7.25, -1.0), h=4, hkv=2),
    "spans of tokens below 0": Case(tq=200, tk=200, terms=("dynamic",), spans=(-4.5,)),
    "one key/value head": Case(h=8, hkv=1, tq=300, tk=300, d=64, terms=("span",), spans=(1, 20.5, 60, 1000)),
    "paper_compat": Case(tq=129, tk=200, terms=("span", "distance_vec"), paper_compat=True, reach=(50, 20)),
    "original, dynamic": Case(tq=129, tk=129, terms=("dynamic", "distance_bias"), paper_compat=True),
    "jumpy": Case(tq=300, tk=400, terms=("jumpy", "distance_bias"), spans=(150.0,)),
    "jumpy, both ways": Case(tq=300, tk=300, terms=("jumpy", "distance_vec"), spans=(150.0,), causal=False),
    "keys that expire": Case(tq=500, tk=600, h=4, hkv=2, terms=("key_span",), spans=(550.0,)),
    "keys that expire, for each head": Case(
        b=2, tq=300, tk=500, terms=("head_key_span", "span", "documents", "sink_logits"), spans=(450.0,), dropout=0.3
    ),
    "keys that expire, in patterns": Case(
        b=2, tq=300, tk=300, terms=("key_span", "dynamic", "blocks", "distance_vec"), spans=(290.0,), causal=False
    ),
    "keys that expire at once": Case(tq=200, tk=200, terms=("key_span", "key_bias"), spans=(0.0,), ramp=1.0),
    "R = 1": Case(tq=63, tk=63, terms=("span",), ramp=1.0, spans=(0, 7, 7.5)),
    "reach 0 and 1": Case(tq=63, tk=63, terms=("span",), reach=(0, 1)),
    "reach": Case(tq=200, tk=300, reach=(3, 150)),
    "reach, both ways": Case(tq=200, tk=200, reach=(3, 150), causal=False),
    "large logits": Case(tq=129, tk=129, d=64, logits=9.0, terms=("span",), spans=(20.5, 300)),
    "rows that see nothing": Case(b=3, tq=17, tk=17, terms=("padding", "sink_logits")),
    "values wider than keys": Case(tq=63, tk=63, d=7, dv=40, terms=("span",)),
    "head size 256": Case(tq=33, tk=63, d=256, terms=("distance_vec",)),
    "transposed rows": Case(b=2, h=4, hkv=2, tq=63, tk=111, d=16, layout="bthd", terms=("span",)),
    "everything": Case(
        b=2, h=4, hkv=2, tq=129, tk=300, reach=(200, 40, 7), spans=(20, 100.5),
        terms=("span", "distance_bias", "head_vec", "key_bias", "documents", "sink_logits", "blocks"),
    ),
    "everything, dynamic, dropped": Case(
        b=2, h=4, hkv=1, tq=129, tk=300, dropout=0.3,
        terms=("dynamic", "distance_bias", "distance_vec", "padding", "documents", "sink_logits", "blocks"),
    ),
    "everything, shuffled": Case(
        b=2, h=2, tq=63, tk=111, positions="shuffled", dropout=0.2,
        terms=("span", "distance_bias", "head_vec", "key_bias", "documents", "sink_logits", "blocks"),
    ),
    "long": Case(tq=700, tk=1500, h=2, d=32, terms=("span", "distance_bias"), spans=(900.5, 30)),
    "long vectors": Case(tq=700, tk=1500, h=2, d=32, terms=("span", "distance_vec"), spans=(900.5, 30)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], "native", dtype)


@st.composite
def any_case(draw) -> Case:
    tq = draw(st.sampled_from((1, 15, 16, 17, 63, 111, 129, 500)))
    group = draw(st.sampled_from((1, 2, 3)))
    hkv = draw(st.sampled_from((1, 2)))
    terms = draw(st.lists(st.sampled_from(TERMS), max_size=4, unique=True))
    for one, other in (
        ("span", "dynamic"),
        ("distance_vec", "head_vec"),
        ("key_bias", "padding"),
        ("key_span", "head_key_span"),
    ):
        if one in terms and other in terms:
            terms.remove(other)
    causal = draw(st.booleans())
    return Case(
        b=draw(st.sampled_from((1, 2))),
        h=hkv * group,
        hkv=hkv,
        tq=tq,
        tk=tq + draw(st.sampled_from((0, 1, 64, 100))),
        d=draw(st.sampled_from((1, 8, 16, 33, 64))),
        terms=tuple(terms),
        causal=causal,
        paper_compat=causal and draw(st.booleans()),
        ramp=draw(st.sampled_from((1.0, 8.0, 32.0))),
        spans=draw(st.sampled_from(((0.0, 3.5), (16.0, 17.0), (40.25, 2000.0)))),
        reach=draw(st.sampled_from((None, (0, 5), (1, 64), (100, 30)))),
        logits=draw(st.sampled_from((1.0, 4.0))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.4))),
        positions=draw(st.sampled_from(("implicit", "implicit", "shuffled", "rows"))),
        layout=draw(st.sampled_from(("bhtd", "bthd"))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(any_case(), st.sampled_from((torch.float32, torch.float32, torch.bfloat16)))
def test_any_case(case: Case, dtype: torch.dtype) -> None:
    check(case, "native", dtype)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bit_identical_whatever_the_threads(threads: int) -> None:
    case = Case(
        b=2, h=4, hkv=2, tq=700, tk=900, d=32, terms=("span", "distance_bias", "distance_vec", "key_bias",
        "sink_logits"), spans=(10, 700.5, 64, 200), dropout=0.1,
    )  # fmt: skip
    made, before = make(case), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(made, "native", torch.float32)
        torch.set_num_threads(threads)
        together = run(made, "native", torch.float32)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_long_sums_are_as_exact_as_sdpa_s() -> None:
    """Values that do not average out, looked at evenly: one sum over all keys would be 2.7 times as far off."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 1024, 64) * 0.1, torch.randn(1, 2, 1024, 64), torch.randn(1, 2, 1024, 64) + 1
    sdpa = torch.nn.functional.scaled_dot_product_attention
    truth = sdpa(q.double(), k.double(), v.double(), is_causal=True)
    ours = (attend(q, k, v, Rule(2), backend="native").out - truth).square().mean().sqrt()
    assert ours < 1.5 * (sdpa(q, k, v, is_causal=True) - truth).square().mean().sqrt()


@pytest.mark.parametrize("term", ["span", "dynamic", "distance_vec", "blocks"])
def test_future_keys_have_no_effect(term: str) -> None:
    made = make(Case(tq=129, tk=129, terms=(term,)))
    if term == "dynamic":
        made.inputs["span"] = made.inputs["span"].float()
    cut = 70
    before = run(made, "native", torch.float32)
    for name in ("q", "k", "v"):
        made.inputs[name][:, :, cut:] += torch.randn_like(made.inputs[name][:, :, cut:])
    after = run(made, "native", torch.float32)
    assert torch.equal(before["out"][:, :, :cut], after["out"][:, :, :cut])
    assert torch.equal(before["lse"][:, :, :cut], after["lse"][:, :, :cut])
    assert not torch.equal(before["out"][:, :, cut:], after["out"][:, :, cut:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["k", "v", "q"])
@pytest.mark.parametrize("term", ["span", "distance_vec", "blocks"])
def test_nan_spreads_only_where_it_is_seen(name: str, bad: float, term: str) -> None:
    case = Case(tq=129, tk=129, h=2, d=16, terms=(term,), spans=(10.0,), reach=(18,))
    clean, spoilt, at = make(case), make(case), 61
    spoilt.inputs[name][0, :, at, 3] = bad
    truth, got = run(clean, "native", torch.float32), run(spoilt, "native", torch.float32)
    oracle = run(spoilt, "reference", torch.float64)
    for result in ("out", "lse"):
        fine = oracle[result].isfinite()
        assert torch.equal(got[result].isfinite(), fine)
        torch.testing.assert_close(got[result][fine], oracle[result][fine], atol=1e-5, rtol=1e-4)
    blind = torch.ones(129, dtype=torch.bool)  # queries that do not see the key
    blind[at : at + 18] = False
    clear = slice(0, at - 18)  # keys that no spoilt query sees
    for result, where in (("dq", blind), ("dk", clear), ("dv", clear)):
        torch.testing.assert_close(got[result][:, :, where], truth[result][:, :, where], atol=1e-5, rtol=1e-4)
    if name != "v":  # a NaN value spoils the weights' gradients, not dv
        assert not got["dv"].isfinite().all()
    assert not got["dq"].isfinite().all() or not got["dk"].isfinite().all()


def test_only_requested_gradients_are_computed() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    span = torch.tensor([4.5, 9.0], requires_grad=True)
    out, lse = attend(q, k, v, Rule(2, span=span, ramp=4.0), backend="native")
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), span)
    assert grad.isfinite().all() and (grad != 0).all()
    with torch.no_grad():
        assert not attend(q, k, v, Rule(2, span=span), backend="native").out.requires_grad


def test_second_derivative_is_refused() -> None:
    q = torch.randn(1, 1, 8, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        torch.autograd.grad(attend(q, q, q, Rule(1), backend="native").out.sum(), q, create_graph=True)


def test_rows_are_not_copied() -> None:
    x = torch.randn(1, 50, 3, 4, 16)  # one projection of [B, T, (q, k, v), H, D]
    q, k, v = x.unbind(2)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    truth = attend(q.contiguous(), k.contiguous(), v.contiguous(), Rule(4), backend="native")
    seen: list[int] = []
    original = kernel.pack_call
    try:
        kernel.pack_call = lambda q, *rest: (seen.append(q.data_ptr()), original(q, *rest))[1]
        out = attend(q, k, v, Rule(4), backend="native").out
    finally:
        kernel.pack_call = original
    assert seen == [q.data_ptr()]
    torch.testing.assert_close(out, truth.out)


def test_refusals_name_every_reason() -> None:
    q = torch.randn(1, 1, 4, 300, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"'native' cannot serve.*float64.*; the head size is 300"):
        attend(q, q, q, Rule(1), backend="native")


def against_the_oracle(q, k, v, **terms) -> dict[str, torch.Tensor]:
    """What native gives, compared with the float64 oracle: out, lse and the gradients of q and of each learned term."""
    found = []
    for backend, dtype in (("native", q.dtype), ("reference", torch.float64)):
        learned = {n: t.to(dtype).requires_grad_() for n, t in terms.items() if n in LEARNED}
        rule = Rule(q.shape[1], **(terms | learned))
        inputs = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
        out, lse = attend(*inputs, rule, backend=backend)
        loss = (out * torch.arange(1, out.shape[3] + 1)).sum() + torch.where(lse > -torch.inf, lse, 0).sum()
        grads = torch.autograd.grad(loss, [*inputs, *learned.values()], allow_unused=True)
        grads = [
            torch.zeros(t.shape) if g is None else g for t, g in zip([*inputs, *learned.values()], grads, strict=True)
        ]
        found.append(dict(zip(["out", "lse", "q", "k", "v", *learned], [out, lse, *grads], strict=True)))
    for name, true in found[1].items():
        torch.testing.assert_close(found[0][name].double(), true.double(), atol=1e-4, rtol=1e-3, msg=name)
    return found[0]


@pytest.mark.parametrize("reach", [torch.tensor([5]).expand(2), torch.tensor([5, 9, 30, 9])[::2]])
def test_reach_that_is_not_contiguous(reach: torch.Tensor) -> None:
    against_the_oracle(*torch.randn(3, 1, 2, 40, 16).unbind(), reach=reach)


def test_rows_that_overlap() -> None:
    windows = torch.randn(1, 2, 60).unfold(2, 32, 1)[:, :, :20]  # 20 rows of 32, each a step after the other
    against_the_oracle(windows, windows, windows)
    heads = torch.randn(1, 60).unfold(1, 32, 1)[:, :4, None, :].expand(1, 4, 7, 32)
    against_the_oracle(heads, heads, heads)


def test_sink_logit_of_minus_infinity_in_rows_that_see_no_key() -> None:
    padding = torch.zeros(1, 1, 40)
    padding[..., :10] = -torch.inf
    against_the_oracle(
        *torch.randn(3, 1, 2, 40, 16).unbind(), sink_logits=torch.tensor([-torch.inf, 0.0]), key_bias=padding
    )


@pytest.mark.parametrize(("b", "tk"), [(0, 5), (2, 0)])
def test_no_rows_or_no_keys_leave_no_gradient_unwritten(b: int, tk: int) -> None:
    from spanformer.ops.kernel import Fixed, Terms, run_backward, run_forward

    q, k = torch.randn(b, 2, 5, 8), torch.randn(b, 2, tk, 8)
    terms = Terms(torch.tensor([3.0, 4.0]), None, None, None, None)
    fixed = Fixed(1.0, 8.0, 0.0, False, 0, 0, *[None] * 8, 0, *[None] * 7)
    out, lse = run_forward(q, k, k, terms, fixed)
    empty_like = torch.empty_like
    try:  # what is not written stays NaN
        torch.empty_like = lambda *args, **options: empty_like(*args, **options).fill_(torch.nan)
        grads = run_backward(q, k, k, out, lse, out, None, terms, fixed, (True, *[False] * 5))
    finally:
        torch.empty_like = empty_like
    assert grads.span is not None and torch.equal(grads.span, torch.zeros(2)) and not grads.q.any()


@pytest.mark.parametrize("ramp", [25.0, 32.0, 41.0, 49.0])
def test_whole_dynamic_spans_have_no_gradient_at_the_ends_of_the_ramp(ramp: float) -> None:
    span = torch.randint(0, 60, (1, 2, 200), generator=torch.Generator().manual_seed(0)).float()
    against_the_oracle(*torch.randn(3, 1, 2, 200, 16).unbind(), span=span, ramp=ramp)


FAR_APART = """
import resource
import torch
from spanformer import Rule, attend

q = torch.randn(2, 2, 40, 16)
near, k_positions = torch.arange(40), torch.arange(40).repeat(2, 1)
rules = (Rule(2), Rule(2, causal=False), Rule(2, span=torch.tensor([3.0, 1e12])))
attend(q, q, q, Rule(2), backend="native")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for rule in rules:
    q_positions = torch.stack([near, near + 10**8])
    got, true = (attend(q, q, q, rule, backend=b, q_positions=q_positions, k_positions=k_positions)
                 for b in ("native", "reference"))
    torch.testing.assert_close(got, true)
wide = Rule(2, span=torch.tensor([3.0, 5.0]), ramp=1e8)
got, true = (attend(q, q, q, wide, backend=b, q_positions=near, k_positions=near.flip(0))
             for b in ("native", "reference"))
torch.testing.assert_close(got, true)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown < 200_000, f"{grown} KiB"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted in KiB")
def test_positions_far_apart_take_no_memory() -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", FAR_APART], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_very_low_bias_hides_like_minus_infinity() -> None:
    """finfo.min is a common way to write −inf."""
    q, k, v = torch.randn(3, 1, 2, 70, 16).unbind()
    results = []
    for low in (torch.finfo(torch.float32).min, -1e38, -torch.inf):
        padding, table = torch.zeros(1, 1, 70), torch.zeros(2, 70)
        padding[..., :10], table[:, 20:30] = low, low
        rule = Rule(2, key_bias=padding, distance_bias=table)
        results.append(attend(q, k, v, rule, backend="native"))
    assert torch.equal(results[0].out, results[2].out) and torch.equal(results[1].out, results[2].out)
    assert torch.equal(results[0].lse, results[2].lse) and torch.equal(results[1].lse, results[2].lse)


def _operator_arguments(case: Case) -> tuple:
    from spanformer.ops.backends.native import _fixed, _learned
    from spanformer.ops.lower import flatten, make_call

    made = make(case)
    leaves = {name: t.float().requires_grad_() for name, t in made.inputs.items()}
    options = {key: value for key, value in made.fixed.items() if not key.endswith("_positions")}
    rule = Rule(case.h, **options, **{name: leaves[name] for name in LEARNED if name in leaves})
    call = flatten(make_call(leaves["q"], leaves["k"], leaves["v"], rule))
    return (call.q, call.k, call.v, *_learned(call), *_fixed(call))


@pytest.mark.parametrize(
    "terms", [(), ("span", "distance_bias", "sink_logits"), ("dynamic", "key_bias", "documents", "blocks")]
)
def test_opcheck(terms: tuple[str, ...]) -> None:
    arguments = _operator_arguments(Case(b=2, h=4, hkv=2, tq=20, tk=33, terms=terms))
    torch.library.opcheck(torch.ops.spanformer.attend.default, arguments)


@pytest.mark.parametrize("terms", [("span",), ("dynamic", "distance_vec", "documents")])
def test_compiles_into_one_graph(terms: tuple[str, ...]) -> None:
    made = make(Case(b=2, h=4, hkv=2, tq=33, tk=40, terms=terms))
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    eager, traced = run(made, "native", torch.float32), run(made, "native", torch.float32, call=compiled)
    for name in eager:
        torch.testing.assert_close(traced[name], eager[name])


OTHER_CODE = """
import torch
from support.cases import Case, check
from spanformer.ops import kernel

assert kernel.library().isa == "{isa}", kernel.library().isa
terms = ("span", "distance_bias", "head_vec", "sink_logits")
check(Case(b=2, h=4, hkv=2, tq=129, tk=200, d=24, terms=terms), "native")
check(Case(b=2, h=4, hkv=2, tq=129, tk=200, d=24, terms=(*terms, "key_bias", "documents"), dropout=0.2), "native")
check(Case(tq=111, tk=129, terms=("dynamic", "documents", "blocks"), causal=False), "native", torch.bfloat16)
check(Case(tq=111, tk=129, terms=("jumpy", "distance_vec"), positions="shuffled"), "native")
check(Case(tq=500, tk=700, d=64, terms=("span", "distance_vec"), spans=(33, 600)), "native")
"""


def run_other_code(isa: str, **environment: str) -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"SPANFORMER_ISA": isa, "PYTHONPATH": path} | environment
    code = OTHER_CODE.format(isa=isa)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_portable_code_agrees() -> None:
    """What processors without AVX2 run: vectors of 4."""
    run_other_code("portable")


@pytest.mark.slow
def test_logic_of_wide_vectors_agrees(tmp_path: Path) -> None:
    """What AVX-512 runs, vectors of 16 and panels of 32, on any machine: the compiler makes them of smaller ones."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    out, csrc = tmp_path / "_kernel.so", Path(__file__).parents[2] / "csrc"
    wide = "-O1 -std=c++17 -fPIC -fopenmp -ffp-contract=fast -shared -DSPANFORMER_ISA=portable -DSPANFORMER_WIDTH=16"
    sources = [str(csrc / name) for name in ("kernel.cpp", "dispatch.cpp")]
    subprocess.run([compiler, *wide.split(), "-o", str(out), *sources], check=True, capture_output=True)
    subprocess.run([sys.executable, str(csrc / "build.py"), "--seal", str(out)], check=True)
    run_other_code("portable", SPANFORMER_KERNEL=str(out))
