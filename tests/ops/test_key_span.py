"""Keys that last long among others are a call of their own: the same result, every gradient, and less to look at."""

from __future__ import annotations

import pytest
import torch

from spanformer import Rule, Union, attend
from spanformer.ops.lower import key_span, make_call
from support.cases import Case, make, run

CASES = [
    Case(b=2, h=4, hkv=2, tq=400, tk=500, d=8, terms=("key_span",)),
    Case(
        b=2, h=2, tq=300, tk=500, d=8, terms=("head_key_span", "sink_logits", "key_bias", "documents", "distance_bias")
    ),
    Case(tq=400, tk=400, d=8, terms=("key_span", "forget"), causal=False),
    Case(b=2, tq=300, tk=400, d=8, terms=("key_span", "padding"), positions="rows"),
    Case(tq=300, tk=300, d=8, terms=("key_span",), paper_compat=True, sink_tokens=2),
]


@pytest.mark.parametrize("backend", ["banded", "native"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_parts_equal_one(case: Case, backend: str, monkeypatch) -> None:
    dtype = torch.float64 if backend == "banded" else torch.float32
    made, split = make(case), []
    g = torch.Generator().manual_seed(1)
    e = made.inputs["key_span"]
    few = torch.rand(e.shape, generator=g) < 0.03
    made.inputs["key_span"] = torch.where(few, 450.0, 4.0 * torch.rand(e.shape, generator=g)).double()
    made.inputs = {name: t.to(dtype).double() for name, t in made.inputs.items()}

    real = key_span.split_lasting

    def counted(call):
        split.append(real(call))
        return split[-1]

    monkeypatch.setattr(key_span, "split_lasting", counted)
    truth, got = run(made, "reference", torch.float64), run(made, backend, dtype)
    assert split and split[-1] is not None
    limits = [max(part.rule.limits()) for part in split[-1]]
    assert limits[0] <= 4 + 8 + 1 and limits[1] > 100
    for name, true in truth.items():
        close = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-4}
        torch.testing.assert_close(got[name], true, **close, msg=name)


def test_one_part_where_two_save_nothing() -> None:
    q = torch.randn(1, 2, 400, 8)
    for e in (torch.full((1, 1, 400), 50.0), torch.full((1, 1, 400), 1000.0), torch.rand(1, 1, 400) * 400):
        assert key_span.split_lasting(make_call(q, q, q, Rule(2, key_span=e))) is None


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_with_strides_and_unions(causal: bool, queries: int) -> None:
    """Folded tokens carry their spans with them, and forget gates are taken off before."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 2, 40, 8, generator=g, dtype=torch.float64) for _ in range(2))
    e = (20 * torch.rand(2, 1, 40, generator=g, dtype=torch.float64)).requires_grad_()
    c = (-torch.rand(1, 2, 40, generator=g, dtype=torch.float64).cumsum(-1)).requires_grad_()
    far = Rule(2, causal=causal, stride=4, skip=12)
    near = Rule(2, causal=causal, stride=[3, 1], reach=12)
    rule = Union(near, far) + Rule(2, causal=causal, key_span=e, ramp=6, forget=c)
    got, true = (attend(q[:, :, -queries:], k, k, rule, backend=name) for name in ("banded", "reference"))
    torch.testing.assert_close(got.out, true.out)
    torch.testing.assert_close(got.lse, true.lse)
    for mine, theirs in zip(*(torch.autograd.grad(x.out.square().sum(), [e, c]) for x in (got, true)), strict=True):
        torch.testing.assert_close(mine, theirs)
