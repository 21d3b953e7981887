"""The kernel's pass over a whole layer with a matrix state (ops/linear/layer.py): values, states and every gradient
against the same mechanism in float64, where plain PyTorch serves it; tests/attention/test_gated.py holds that against
its equations.

Tolerance: at most FACTOR times the error of the PyTorch path in the dtype under test, plus a few units in the last
place of the largest value.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.attention.gated_delta import GatedDelta
from spanformer.attention.gated_linear import GatedLinear
from spanformer.memory import MemoryShape
from spanformer.ops import kernel
from spanformer.ops.linear import layer
from support.cases import FACTOR, UNITS, changed

pytestmark = pytest.mark.skipif(bool(kernel.problem()), reason="no kernel")
DIM = 24


@dataclass
class Case:
    kind: str = "delta"
    t: int = 40
    b: int = 2
    h: int = 2
    hkv: int = 2
    d: int = 16
    conv: int = 4
    carried: bool = False
    """a state and the convolution's last inputs come from earlier tokens"""
    documents: bool = False
    padding: bool = False
    layout: str = "bhtd"


CASES = [
    *(Case(t=t, carried=True) for t in (1, 2, 3, 31, 32, 33, 101, 300)),
    *(Case(conv=conv, t=70, carried=True) for conv in (0, 1, 2, 7, 40)),
    Case(t=70, d=7),
    Case(t=70, d=40, h=6, hkv=2, carried=True),
    Case(t=70, layout="bthd", h=4, hkv=2),
    *(Case(t=t, documents=True, carried=True, h=4) for t in (33, 150)),
    *(Case(t=t, padding=True, carried=True) for t in (1, 2, 33, 101)),
    Case(t=150, documents=True, padding=True, carried=True, b=3),
    Case("linear", t=101, carried=True, h=4),
    Case("linear", t=150, documents=True, padding=True, carried=True, d=20),
    Case("linear", t=1, carried=True),
]


def name_of(case: Case) -> str:
    return " ".join(changed(case)) or "plain"


def made(case: Case) -> GatedDelta | GatedLinear:
    torch.manual_seed(0)
    if case.kind == "linear":
        m = GatedLinear(DIM, case.h, case.d, case.hkv)
    else:
        m = GatedDelta(DIM, case.h, case.d, case.hkv, conv=case.conv)
    with torch.no_grad():
        m.norm.uniform_(0.5, 1.5)
    return m.double()


def drawn(case: Case) -> tuple[dict[str, Tensor], Tensor | None, Tensor | None]:
    g = torch.Generator().manual_seed(1)

    def normal(heads: int) -> Tensor:
        if case.layout == "bthd":
            shape = (case.b, case.t, heads, case.d)
            return torch.randn(shape, generator=g, dtype=torch.float64).transpose(1, 2)
        return torch.randn(case.b, heads, case.t, case.d, generator=g, dtype=torch.float64)

    inputs = {"q": normal(case.h), "k": normal(case.hkv), "v": normal(case.hkv)}
    inputs["x"] = torch.randn(case.b, case.t, DIM, generator=g, dtype=torch.float64)
    documents = (torch.rand(case.b, case.t, generator=g) < 0.1).cumsum(1) if case.documents else None
    padding = torch.rand(case.b, case.t, generator=g) < 0.3 if case.padding else None
    return inputs, padding, documents


def run(case: Case, dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
    """Output at tokens that are no padding, the state, and the gradient of every input and parameter."""
    m = copy.deepcopy(made(case)).to(dtype)
    m.backend = backend
    inputs, padding, documents = drawn(case)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in inputs.items()}
    state = m.empty_state(MemoryShape(case.b, case.hkv, case.d, dtype=dtype))
    g = torch.Generator().manual_seed(2)
    if case.carried:
        state = {name: torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype) for name, t in state.items()}
        state["s"].requires_grad_()
        leaves["s"] = state["s"]
    x = leaves.pop("x")
    given = m.token_inputs(leaves["k"], leaves["v"], View(x=x)) | m.query_inputs(leaves["q"])
    gates = {name: t.detach().requires_grad_() for name, t in given.items() if name not in leaves}
    leaves |= gates  # how they come from x is PyTorch's
    found, after = m.run(leaves["q"], given | gates, state, padding, documents)
    out = found.out if padding is None else found.out.masked_fill(padding[:, None, :, None], 0)
    results = {"out": out} | {f"after {name}": t for name, t in after.items()}
    loss = sum(
        (t.double() * torch.randn(t.shape, generator=g, dtype=torch.float64)).sum()
        for name, t in results.items() if name in ("out", "after s")
    )  # fmt: skip
    leaves |= {name: p for name, p in m.named_parameters() if "norm" in name or "convolutions" in name}
    grads = torch.autograd.grad(loss, list(leaves.values()))  # pyright: ignore
    results |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: t.detach().double() for name, t in results.items()}


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pass_equals_float64(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    served = []
    once = layer.run_layer
    for module in ("gated_delta", "gated_linear"):
        monkeypatch.setattr(
            f"spanformer.attention.{module}.run_layer", lambda *given: served.append(once(*given)) or served[-1]
        )
    found = run(case, dtype, "native")
    assert len(served) == 1 and served[0] is not None
    true, plain = run(case, torch.float64, "banded"), run(case, dtype, "banded")
    for name, right in true.items():
        unit = torch.finfo(dtype).eps
        allowed = FACTOR * (plain[name] - right).abs().max() + UNITS * unit * right.abs().max()
        worst = (found[name] - right).abs().max()
        assert worst <= allowed, f"{name}: {worst:.3g} > {allowed:.3g}"


def test_native_is_bit_identical_for_any_number_of_threads() -> None:
    before, found = torch.get_num_threads(), []
    case = Case(t=300, b=3, h=4, d=64, documents=True, padding=True, carried=True)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(run(case, torch.float32, "native"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in other)


@pytest.mark.parametrize("kind", ["delta", "linear"])
def test_nan_stays_in_its_document(kind: str) -> None:
    case = Case(kind, t=101)
    m = made(case).float()
    inputs, _, _ = drawn(case)
    given = {name: t.float() for name, t in inputs.items()}
    documents = torch.tensor([0] * 40 + [1] * 30 + [2] * 31).expand(2, 101)

    def once() -> tuple[Tensor, dict[str, Tensor]]:
        state = m.empty_state(MemoryShape(2, 2, case.d))
        tokens = m.token_inputs(given["k"], given["v"], View(x=given["x"])) | m.query_inputs(given["q"])
        found, after = m.run(given["q"], tokens, state, None, documents)
        return found.out, after

    true, state = once()
    given["k"][:, :, 50] = torch.nan
    found, after = once()
    rest = torch.cat([torch.arange(50), torch.arange(70, 101)])
    assert bool(found[:, :, 50:70].isnan().all())
    torch.testing.assert_close(found[:, :, rest], true[:, :, rest], rtol=1e-4, atol=1e-5)
    for name, right in state.items():
        torch.testing.assert_close(after[name], right, rtol=1e-4, atol=1e-5)


def test_gradients_behind_nan_are_nan_and_those_of_other_documents_are_not() -> None:
    case = Case(t=96)
    m = made(case).float()
    inputs, _, _ = drawn(case)
    documents = torch.tensor([0] * 32 + [1] * 64).expand(2, 96)
    inputs["k"][:, :, 80] = torch.nan
    leaves = {name: t.float().requires_grad_() for name, t in inputs.items()}
    state = m.empty_state(MemoryShape(2, 2, case.d))
    tokens = m.token_inputs(leaves["k"], leaves["v"], View(x=leaves["x"])) | m.query_inputs(leaves["q"])
    out = m.run(leaves["q"], tokens, state, None, documents)[0].out
    dk = torch.autograd.grad(out[:, :, :32].sum(), leaves["k"])[0]
    assert bool(dk[:, :, 64:].isnan().all())
