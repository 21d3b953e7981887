"""The gated delta rule and gated linear attention: every path against the recurrence in float64, which is itself held
against the equations written for all pairs. Values, states and every gradient.

Tolerance: at most FACTOR times the error of the recurrence in the dtype under test, plus a few units in the last place
of the largest value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.ops import attend_delta, attend_gated, kernel
from support.cases import changed
from support.state_cases import StateCase, check_close, check_threads, leaves_of, rounded

NATIVE = pytest.param("native", marks=pytest.mark.skipif(bool(kernel.problem()), reason="no kernel"))
BACKENDS = ["portable", NATIVE]
CHUNK = 32  # of the kernel; the portable one has 64


@dataclass
class Case(StateCase):
    op: str = "delta"
    d: int = 16


def both(**options) -> list[Case]:
    """The same case of both operations; gated linear attention has no call without gates."""
    case = Case(**options)
    return [case, replace(case, op="gated", decay=case.decay or 0.3)]


CASES = [
    *both(),
    *(case for t in (1, 31, 32, 33, 63, 64, 65, 101, 300) for case in both(t=t, decay=0.5, state=True)),
    Case(t=101, state=True),
    *both(t=101, d=7, dv=5, decay=0.1),
    *both(t=70, d=40, dv=33, state=True, decay=0.2),
    *both(t=70, d=64, dv=64, state=True, decay=2.0),
    *both(t=101, h=6, hkv=2, decay=0.3, state=True),
    *both(t=101, decay=50.0, state=True),
    *both(t=150, documents=True, state=True, decay=0.2, h=4),
    *both(t=70, padding=True, decay=0.2, state=True),
    *both(t=101, layout="bthd", decay=0.2),
]
OPERATIONS = ["delta", "gated"]


def name_of(case: Case) -> str:
    return " ".join(changed(case)) or "plain"


def make(case: Case) -> tuple[dict[str, Tensor], dict]:
    g = torch.Generator().manual_seed(case.seed)
    normal = partial(case.normal, g)
    tokens = (case.b, case.hkv, case.t)
    inputs = {
        "q": normal(case.b, case.h, case.t, case.d),
        "k": F.normalize(normal(*tokens, case.d), dim=3),
        "v": normal(*tokens, case.dv),
    }
    if case.op == "delta":
        inputs["beta"] = torch.rand(tokens, generator=g, dtype=torch.float64)
    if case.decay:
        shape = tokens if case.op == "delta" else (*tokens, case.d)
        inputs["decay" if case.op == "delta" else "gates"] = -case.decay * torch.rand(
            shape, generator=g, dtype=torch.float64
        )
    if case.state:
        inputs["state"] = normal(case.b, case.hkv, case.d, case.dv)
    return inputs, case.hidden(g)


def operation(case: Case):
    return {"delta": attend_delta, "gated": attend_gated}[case.op]


def run(case: Case, inputs: dict[str, Tensor], fixed: dict, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Both results, and the gradient of every input for one random direction in each result."""
    leaves = leaves_of(inputs, dtype, ("q", "k", "v"))
    out, after = operation(case)(**leaves, **fixed, backend=backend)
    g = torch.Generator().manual_seed(1)
    loss = sum((t.double() * torch.randn(t.shape, generator=g, dtype=torch.float64)).sum() for t in (out, after))
    grads = torch.autograd.grad(loss, list(leaves.values()))  # pyright: ignore
    found = {"out": out, "after": after} | {f"d_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: t.detach().double() for name, t in found.items()}


def check(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs, fixed = make(case)
    inputs = rounded(inputs, dtype, ("q", "k", "v"))
    truth = run(case, inputs, fixed, torch.float64, "reference")
    plain = run(case, inputs, fixed, dtype, "reference")
    found = run(case, inputs, fixed, dtype, backend)
    check_close(truth, plain, found, dtype, ("out", "d_q", "d_k", "d_v"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_the_recurrence(case: Case, backend: str) -> None:
    check(case, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if c.t in (101, 150, 70)], ids=name_of)
def test_bfloat16_inputs_keep_a_float32_state(case: Case, backend: str) -> None:
    check(case, torch.bfloat16, backend)
    inputs, fixed = make(case)
    given = {name: t.bfloat16() if name in "qkv" else t.float() for name, t in inputs.items()}
    out, after = operation(case)(**given, **fixed, backend=backend)
    assert out.dtype == torch.bfloat16 and after.dtype == torch.float32


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_portable_in_float64_equals_the_recurrence_to_rounding(case: Case) -> None:
    inputs, fixed = make(case)
    truth, found = (run(case, inputs, fixed, torch.float64, name) for name in ("reference", "portable"))
    for name, true in truth.items():
        torch.testing.assert_close(found[name], true, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_delta_reference_equals_dense_pairs() -> None:
    """out = Q (KᵀU) as one masked product over the whole text, U by an inverse of T × T."""
    inputs, _ = make(Case(t=40, decay=0.3, state=True))
    q, k, v, beta, decay, state = inputs.values()
    out, after = attend_delta(q, k, v, beta, decay, state, backend="reference")
    sums = decay.cumsum(2)
    factor = (sums[..., None] - sums[..., None, :]).exp().tril()
    known = torch.eye(40, dtype=torch.float64) + beta[..., None] * (k @ k.mT * factor).tril(-1)
    u = torch.linalg.inv(known) @ (beta[..., None] * (v - sums.exp()[..., None] * (k @ state)))
    torch.testing.assert_close(out, sums.exp()[..., None] * (q @ state) + (q @ k.mT * factor) @ u)
    left = (sums[..., -1:] - sums).exp()[..., None]
    torch.testing.assert_close(after, sums[..., -1:, None].exp() * state + (left * k).mT @ u)


def test_gated_reference_equals_dense_pairs() -> None:
    inputs, _ = make(Case(op="gated", t=40, decay=0.3, state=True))
    q, k, v, gates, state = inputs.values()
    out, after = attend_gated(q, k, v, gates, state, backend="reference")
    sums = gates.cumsum(2)
    factor = (sums[:, :, :, None] - sums[:, :, None]).exp()  # [B, H, T, T, D]
    pairs = torch.einsum("bhid,bhjd,bhijd->bhij", q, k, factor).tril()
    torch.testing.assert_close(out, pairs @ v + (q * sums.exp()) @ state)
    last = sums[:, :, -1:]
    torch.testing.assert_close(after, last.exp().mT * state + (k * (last - sums).exp()).mT @ v)


def test_delta_rule_replaces_what_a_key_holds() -> None:
    """β = 1 and unit keys: reading with the last key returns the last value, whatever came before under that key."""
    k = F.normalize(torch.randn(1, 1, 5, 8), dim=3)
    k = torch.cat([k, k[:, :, 2:3]], 2)
    v, beta = torch.randn(1, 1, 6, 4), torch.ones(1, 1, 6)
    out, state = attend_delta(k, k, v, beta)
    torch.testing.assert_close(out, v, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((k[0, 0, 5] @ state[0, 0]), v[0, 0, 5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("cuts", [[1], [31, 33], [32, 64], [5, 6, 40, 77]])
@pytest.mark.parametrize("op", OPERATIONS)
def test_state_carries_a_text_over_any_split(op: str, backend: str, cuts: list[int]) -> None:
    case = Case(op=op, t=101, decay=0.3)
    inputs, _ = make(case)
    given = {name: t.float() for name, t in inputs.items()}
    whole, after = operation(case)(**given, backend=backend)
    outs, state = [], None
    for piece in zip(*(t.tensor_split(cuts, 2) for t in given.values()), strict=True):
        out, state = operation(case)(*piece, state=state, backend=backend)
        outs.append(out)
    assert state is not None
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 31, 32, 50, 96])
@pytest.mark.parametrize("learning", [False, True])
@pytest.mark.parametrize("op", OPERATIONS)
def test_later_tokens_change_no_earlier_row(op: str, backend: str, cut: int, learning: bool) -> None:
    case = Case(op=op, t=101, decay=0.3, h=4)
    inputs, _ = make(case)
    named = {name: t.float().requires_grad_(learning) for name, t in inputs.items()}
    true, _ = operation(case)(**named, backend=backend)
    values = [0.25, torch.nan, torch.inf] + ([3.0, 1e30] if backend == "native" else [])  # of which two overflow
    for value in values:
        other = {name: t.detach().clone().requires_grad_(learning) for name, t in named.items()}
        for t in other.values():
            gate = t is other.get("decay") or t is other.get("gates")
            t.detach()[:, :, cut:] = -1.0 if gate and abs(value) < torch.inf else value
        found, after = operation(case)(**other, backend=backend)
        assert torch.equal(found[:, :, :cut], true[:, :, :cut])
        if value not in (0.25, 3.0):
            assert not bool(torch.isfinite(found[:, :, cut:]).any() or torch.isfinite(after).any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_nan_in_a_query_stays_in_its_row(op: str, backend: str) -> None:
    case = Case(op=op, t=70, decay=0.3)
    inputs, _ = make(case)
    given = {name: t.float() for name, t in inputs.items()}
    true, after = operation(case)(**given, backend=backend)
    given["q"][:, :, 40] = torch.nan
    found, state = operation(case)(**given, backend=backend)
    assert bool(found[:, :, 40].isnan().all()) and torch.equal(state, after)
    rest = torch.arange(70) != 40
    torch.testing.assert_close(found[:, :, rest], true[:, :, rest])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_nan_stays_in_its_document(op: str, backend: str) -> None:
    case = Case(op=op, t=101, decay=0.3)
    inputs, _ = make(case)
    given = {name: t.float() for name, t in inputs.items()}
    documents = torch.tensor([0] * 40 + [1] * 30 + [2] * 31).expand(2, 101)
    true, after = operation(case)(**given, documents=documents, backend=backend)
    given["k"][:, :, 50] = torch.nan
    found, state = operation(case)(**given, documents=documents, backend=backend)
    assert bool(found[:, :, 50:70].isnan().all())
    rest = torch.cat([torch.arange(50), torch.arange(70, 101)])
    torch.testing.assert_close(found[:, :, rest], true[:, :, rest], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(bool(kernel.problem()), reason="no kernel")
@pytest.mark.parametrize("op", OPERATIONS)
def test_native_is_bit_identical_for_any_number_of_threads(op: str) -> None:
    case = Case(op=op, b=3, h=4, t=300, d=64, dv=64, decay=0.3, state=True, documents=True)
    inputs, fixed = make(case)
    check_threads(lambda: run(case, inputs, fixed, torch.float32, "native"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPERATIONS)
def test_strong_gates_give_no_nan(op: str, backend: str) -> None:
    case = Case(op=op, t=101, d=64, dv=64, decay=1.0, state=True)
    inputs, fixed = make(case)
    name = "decay" if op == "delta" else "gates"
    inputs[name] = torch.full_like(inputs[name], -50.0)
    inputs["q"] *= 100
    for found in run(case, inputs, fixed, torch.float32, backend).values():
        assert bool(torch.isfinite(found).all())


@pytest.mark.skipif(bool(kernel.problem()), reason="no kernel")
def test_native_is_an_operator_for_torch_compile() -> None:
    case = Case(t=40, decay=0.3, state=True)
    inputs, _ = make(case)
    leaves = [t.float() for t in inputs.values()]
    torch.library.opcheck(torch.ops.spanformer.matrix_state.default, (*leaves, None, False))
    learning = [t.requires_grad_() for t in leaves]
    torch.library.opcheck(
        torch.ops.spanformer.matrix_state.default, (*learning, None, True),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip
    compiled = torch.compile(attend_delta, backend="aot_eager", fullgraph=True)
    grads = []
    for run in (compiled, attend_delta):
        out, after = run(*learning)
        grads.append(torch.autograd.grad(out.sum() + after.square().sum(), learning))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(q=torch.ones(1, 2, 0, 4), k=torch.ones(1, 2, 0, 4), v=torch.ones(1, 2, 0, 4)), "q has 0 tokens"),
        (dict(k=torch.ones(1, 2, 5, 3)), "expected the same batch, tokens and size"),
        (dict(k=torch.ones(2, 5, 4)), r"expected \[B, H, T, D\]"),
        (dict(k=torch.ones(1, 4, 5, 4), v=torch.ones(1, 4, 5, 4)), "q has 2 heads; expected a multiple of k's 4"),
        (dict(v=torch.ones(1, 2, 5, 4).double()), "expected one floating-point dtype"),
        (dict(beta=torch.ones(1, 2, 4)), r"beta has shape \[1, 2, 4\] and dtype .*; expected \[1, 2, 5\]"),
        (dict(decay=torch.ones(1, 2, 1)), r"decay has shape \[1, 2, 1\] and dtype .*; expected \[1, 2, 5\]"),
        (dict(decay=torch.ones(1, 2, 5).long()), "decay has shape .* of a floating-point dtype"),
        (dict(state=torch.ones(1, 2, 4, 5)), r"state has shape \[1, 2, 4, 5\]; expected \[1, 2, 4, 4\]"),
        (dict(state=torch.ones(1, 2, 4, 4).bfloat16()), "state is torch.bfloat16 .*; expected torch.float32"),
        (dict(padding=torch.ones(1, 5)), "padding has dtype"),
        (dict(documents=torch.ones(1, 4)), r"documents has shape \[1, 4\]; expected \[1, 5\]"),
        (dict(backend="fast"), "backend is 'fast'; expected one of auto, native"),
    ],
)
def test_bad_input_is_one_sentence(change: dict, said: str) -> None:
    given = {name: torch.ones(1, 2, 5, 4) for name in "qkv"} | {"beta": torch.ones(1, 2, 5)} | change
    with pytest.raises(ValueError, match=said):
        attend_delta(**given)  # pyright: ignore[reportArgumentType]


def test_native_refuses_what_it_cannot_serve() -> None:
    inputs, _ = make(Case())
    with pytest.raises(ValueError, match="'native' cannot serve this call: v has dtype"):
        attend_delta(**inputs, backend="native")
