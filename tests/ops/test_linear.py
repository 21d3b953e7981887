"""Linear attention of every backend against the recurrence in float64: values, states and every gradient.

Tolerance: at most FACTOR times the error of the recurrence in the dtype under test, plus a few units in the last place
of the largest value.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from spanformer.ops import Attended, LinearState, attend_far, attend_linear, merge, sum_linear
from spanformer.ops.linear.native import unusable
from support.cases import changed
from support.state_cases import StateCase, check_close, check_threads, leaves_of, rounded

BACKENDS = ["portable", pytest.param("native", marks=pytest.mark.skipif(bool(unusable()), reason="no kernel"))]
CHUNK = 32


@dataclass
class Case(StateCase):
    m: int = 16
    near: str = ""
    """ "heads" or "tokens" """
    ramp: float = 8.0
    skipped: int = 0
    """tokens before the first query, beside `near`"""
    normalize: bool = True
    elu: bool = False
    signed: bool = False
    """features of both signs"""


CASES = [
    Case(),
    *(Case(t=t) for t in (1, 31, 32, 33, 63, 64, 65, 101, 200)),
    *(Case(t=t, decay=0.5, state=True) for t in (1, 31, 32, 33, 101)),
    Case(t=101, m=7, dv=5, decay=0.1),
    Case(t=70, m=40, dv=33, state=True),
    Case(t=70, m=100, dv=64, state=True, decay=2.0),
    Case(t=101, h=6, hkv=2, decay=0.3, state=True),
    Case(t=101, decay=50.0),
    Case(t=101, documents=True, state=True),
    Case(t=150, documents=True, state=True, decay=0.2, h=4),
    Case(t=70, padding=True, decay=0.2, state=True),
    Case(t=70, normalize=False, signed=True, decay=0.2, state=True),
    Case(t=101, layout="bthd", decay=0.2),
    Case(t=101, m=20, elu=True, decay=0.2, state=True),
    Case(t=70, elu=True, padding=True, h=4),
    Case(t=101, elu=True, near="heads"),
    Case(t=150, near="heads", state=True),
    Case(t=150, near="heads", h=6, ramp=32.0),
    Case(t=150, near="tokens", state=True, h=4),
    Case(t=150, near="heads", documents=True, state=True),
    Case(b=1, h=1, hkv=1, t=300, near="tokens", m=20, dv=12),
    *(
        Case(t=101, near=near, skipped=n, state=True, h=4)
        for n, near in ((100, "heads"), (32, "heads"), (69, "tokens"))
    ),
    Case(t=150, near="heads", skipped=77, documents=True, state=True),
    Case(t=101, near="heads", skipped=64, padding=True),
]


def make(case: Case) -> tuple[dict[str, Tensor], dict]:
    g = torch.Generator().manual_seed(case.seed)
    normal = partial(case.normal, g)

    def features(x: Tensor) -> Tensor:
        return x if case.signed or (case.elu and x.ndim == 4) else torch.nn.functional.elu(x) + 1

    inputs = {
        "a": features(normal(case.b, case.h, case.t - case.skipped, case.m)),
        "b": features(normal(case.b, case.hkv, case.t, case.m)),
        "v": normal(case.b, case.hkv, case.t, case.dv),
    }
    if case.decay:
        inputs["decay"] = -case.decay * torch.rand(case.b, case.hkv, case.t, generator=g, dtype=torch.float64)
    if case.state:
        inputs["s"] = normal(case.b, case.hkv, case.m, case.dv)
        inputs["z"] = features(normal(case.b, case.hkv, case.m)) * 4
    if case.near:
        shape = (case.h,) if case.near == "heads" else (case.b, case.h, case.t - case.skipped)
        inputs["near"] = torch.rand(*shape, generator=g, dtype=torch.float64) * 90 - case.ramp
    return inputs, case.hidden(g)


def run(case: Case, inputs: dict[str, Tensor], fixed: dict, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Every result, and the gradient of every input for one random direction in each result."""
    leaves = leaves_of(inputs, dtype, ("a", "b", "v"))
    state = LinearState(leaves["s"], leaves["z"]) if case.state else None
    given = dict(state=state, backend=backend, **fixed)
    qkv = [leaves[name] for name in "abv"]
    if case.near:
        out, lse = attend_far(*qkv, leaves["near"], case.ramp, elu=case.elu, **given)
        found = {"out": out, "lse": lse}
    elif case.normalize:
        (out, lse), after = attend_linear(*qkv, leaves.get("decay"), elu=case.elu, **given)
        found = {"out": out, "lse": lse, "s": after.s, "z": after.z}
    else:
        (out, lse), after = sum_linear(*qkv, leaves.get("decay"), **given)
        found = {"out": out, "lse": lse, "s": after.s, "z": after.z}
    seen = torch.isfinite(lse)
    g = torch.Generator().manual_seed(1)
    loss = torch.zeros((), dtype=torch.float64)
    for t in found.values():
        direction = torch.randn(t.shape, generator=g, dtype=torch.float64)
        kept = torch.where(seen, t, 0) if t is lse else t
        loss = loss + (kept.double() * direction).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {name: t.detach().double() for name, t in found.items()} | {
        f"d_{name}": grad.double() for name, grad in zip(leaves, grads, strict=True)
    }


def check(case: Case, dtype: torch.dtype, backend: str) -> None:
    inputs, fixed = make(case)
    inputs = rounded(inputs, dtype, ("a", "b", "v"))
    truth = run(case, inputs, fixed, torch.float64, "reference")
    plain = run(case, inputs, fixed, dtype, "reference")
    found = run(case, inputs, fixed, dtype, backend)
    # chunked, the decay's gradient is a sum of differences a·da − b·db, each rounded by its own size
    summed = max((inputs[x] * truth[f"d_{x}"]).sum(3).abs().max() for x in "ab")
    check_close(truth, plain, found, dtype, ("out", "d_a", "d_b", "d_v"), {"d_decay": summed})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(changed(case)) or "plain")
def test_equals_the_recurrence(case: Case, backend: str) -> None:
    check(case, torch.float32, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [CASES[7], CASES[14], CASES[18], CASES[-3]], ids=lambda c: " ".join(changed(c)))
def test_bfloat16_inputs_keep_a_float32_state(case: Case, backend: str) -> None:
    check(case, torch.bfloat16, backend)


def test_portable_in_float64_equals_the_recurrence_to_rounding() -> None:
    for case in CASES:
        inputs, fixed = make(case)
        truth, found = (run(case, inputs, fixed, torch.float64, name) for name in ("reference", "portable"))
        for name, true in truth.items():
            torch.testing.assert_close(
                found[name], true, rtol=1e-9, atol=1e-9, msg=lambda m, n=name, c=case: f"{c} {n}: {m}"
            )


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("cuts", [[1], [31, 33], [32, 64], [5, 6, 40, 77]])
def test_state_carries_a_text_over_any_split(backend: str, cuts: list[int]) -> None:
    inputs, _ = make(Case(t=101, decay=0.3))
    a, b, v, decay = (t.float() for t in inputs.values())
    whole, after = attend_linear(a, b, v, decay, backend=backend)
    outs, lses, state = [], [], None
    for piece in zip(*(t.tensor_split(cuts, 2) for t in (a, b, v, decay)), strict=True):
        (out, lse), state = attend_linear(*piece, state, backend=backend)
        outs.append(out)
        lses.append(lse)
    assert state is not None
    for found, true in (
        (torch.cat(outs, 2), whole.out),
        (torch.cat(lses, 2), whole.lse),
        *zip(state, after, strict=True),
    ):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", [Case(t=101), Case(t=101, decay=0.3), Case(t=101, near="tokens")], ids=["plain", "decay", "near"]
)
@pytest.mark.parametrize("cut", [1, 31, 32, 50, 96])
def test_later_tokens_change_no_earlier_row(case: Case, backend: str, cut: int) -> None:
    inputs, _ = make(case)
    named = {name: t.float() for name, t in inputs.items()}

    def attended(named: dict[str, Tensor]) -> Attended:
        if case.near:
            return attend_far(**named, ramp=case.ramp, backend=backend)
        return attend_linear(**named, backend=backend)[0]

    true = attended(named)
    for value in (3.0, float("nan"), float("inf")):
        changed = {name: t.clone() for name, t in named.items()}
        for name in ("a", "b", "v"):
            changed[name][:, :, cut:] = value
        if "decay" in changed and value == 3.0:
            changed["decay"][:, :, cut:] = -1.0
        found = attended(changed)
        assert torch.equal(found.out[:, :, :cut], true.out[:, :, :cut])
        assert torch.equal(found.lse[:, :, :cut], true.lse[:, :, :cut])


@pytest.mark.skipif(bool(unusable()), reason="no kernel")
@pytest.mark.parametrize(
    "case",
    [Case(b=3, h=4, t=200, m=64, dv=64, decay=0.3, state=True), Case(t=200, near="heads")],
    ids=["decay", "near"],
)
def test_native_is_bit_identical_for_any_number_of_threads(case: Case) -> None:
    inputs, fixed = make(case)
    check_threads(lambda: run(case, inputs, fixed, torch.float32, "native"))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_merges_with_itself_over_disjoint_keys(backend: str) -> None:
    """Attention over half of the keys and over the other half, merged by lse."""
    inputs, _ = make(Case(t=77))
    a, b, v = (t.float() for t in inputs.values())
    even = (torch.arange(77) % 2 == 0).expand(2, 77)
    whole, _ = attend_linear(a, b, v, backend=backend)
    halves = [attend_linear(a, b, v, padding=hidden, backend=backend)[0] for hidden in (even, ~even)]
    torch.testing.assert_close(merge(halves).out, whole.out, rtol=1e-5, atol=1e-5)


def test_row_without_weight_gives_zeros() -> None:
    a = b = torch.zeros(1, 1, 40, 8)
    for backend in ("reference", "portable", "auto"):
        found, _ = attend_linear(a, b, torch.ones(1, 1, 40, 8), backend=backend)
        assert torch.equal(found.out, torch.zeros(1, 1, 40, 8)) and bool((found.lse == -torch.inf).all())


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_both_directions_equal_dense_weights(documents: bool, padding: bool) -> None:
    case = Case(t=70, h=4, documents=documents, padding=padding)
    inputs, fixed = make(case)
    a, b, v = (t.requires_grad_() for t in inputs.values())
    found, _ = attend_linear(a, b, v, causal=False, **fixed)
    weight = a @ b.repeat_interleave(2, 1).transpose(2, 3)
    if padding:
        weight = weight.masked_fill(fixed["padding"][:, None, None], 0)
    if documents:
        ids = fixed["documents"]
        weight = weight * (ids[:, None, :, None] == ids[:, None, None])
    true = weight / weight.sum(3, keepdim=True) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(found.out, true)
    torch.testing.assert_close(found.lse, weight.sum(3).log())
    direction = torch.randn(true.shape, dtype=torch.float64)
    mine, theirs = (torch.autograd.grad((t * direction).sum(), (a, b, v)) for t in (found.out, true))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_and_features_of_any_size_give_no_nan(backend: str) -> None:
    inputs, _ = make(Case(t=64, m=64, dv=64))
    a, b, v = (inputs[name].float() * size for name, size in (("a", 1e4), ("b", 1e4), ("v", 1.0)))
    found, state = attend_linear(a, b, v, torch.full((2, 2, 64), -50.0), backend=backend)
    assert not bool(torch.isnan(found.out).any()) and bool(torch.isfinite(state.s).all())


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(a=torch.ones(1, 2, 0, 4), b=torch.ones(1, 2, 0, 4), v=torch.ones(1, 2, 0, 4)), "a has 0 tokens"),
        (dict(b=torch.ones(1, 2, 5, 3)), "expected the same batch, tokens and features"),
        (dict(b=torch.ones(1, 4, 5, 4), v=torch.ones(1, 4, 5, 4)), "a has 2 heads; expected a multiple of b's 4"),
        (dict(v=torch.ones(1, 2, 5, 4).double()), "expected one floating-point dtype"),
        (dict(decay=torch.ones(1, 2, 4)), r"decay has shape \[1, 2, 4\]; expected \[1 or 1, 2, 1 or 5\]"),
        (dict(state=LinearState(torch.ones(1, 2, 4, 5), torch.ones(1, 2, 4))), "state has s"),
        (dict(state=LinearState(torch.ones(1, 2, 4, 4).double(), torch.ones(1, 2, 4))), "state is torch.float64"),
        (dict(padding=torch.ones(1, 5)), "padding has dtype"),
        (dict(documents=torch.ones(1, 4)), r"documents has shape \[1, 4\]; expected \[1, 5\]"),
        (dict(backend="fast"), "backend is 'fast'; expected one of auto, native"),
        (dict(causal=False, decay=torch.zeros(1, 2, 1)), "causal is False beside decay"),
    ],
)
def test_bad_input_is_one_sentence(change: dict, said: str) -> None:
    given = {name: torch.ones(1, 2, 5, 4) for name in "abv"} | change
    with pytest.raises(ValueError, match=said):
        attend_linear(**given)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(near=torch.ones(3)), r"near has shape \[1, 3, 1\]; expected \[2\]"),
        (dict(ramp=0.0), "ramp is 0.0; expected a number above 0"),
        (dict(a=torch.ones(1, 2, 6, 4)), "expected the same batch, tokens and features"),
        (dict(padding=torch.ones(1, 3, 5, dtype=torch.bool)), r"padding has shape \[1, 3, 5\]; expected \[1, 5\]"),
    ],
)
def test_bad_border_is_one_sentence(change: dict, said: str) -> None:
    given = {name: torch.ones(1, 2, 5, 4) for name in "abv"} | {"near": torch.ones(2), "ramp": 1.0} | change
    with pytest.raises(ValueError, match=said):
        attend_far(**given)


def test_cases_differ() -> None:
    assert len({str(dataclasses.astuple(case)) for case in CASES}) == len(CASES)
