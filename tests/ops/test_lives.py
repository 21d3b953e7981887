"""Keys that last long among others are attended to apart: the same result, every gradient, and less to look at."""

from __future__ import annotations

import pytest
import torch

from cases import Case, make, run
from spanformer.ops import lives, parts
from spanformer.ops.call import make_call
from spanformer.ops.rule import Rule

CASES = [
    Case(b=2, h=4, hkv=2, tq=400, tk=500, d=8, terms=("key_span",)),
    Case(b=2, h=2, tq=300, tk=500, d=8, terms=("head_key_span", "sinks", "key_bias", "documents", "distance_bias")),
    Case(tq=400, tk=400, d=8, terms=("key_span", "forget"), causal=False),
    Case(b=2, tq=300, tk=400, d=8, terms=("key_span", "padding"), positions="rows"),
    Case(tq=300, tk=300, d=8, terms=("key_span",), original=True, kept=2),
]


@pytest.mark.parametrize("backend", ["banded", "native"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_in_two_parts(case: Case, backend: str, monkeypatch) -> None:
    dtype = torch.float64 if backend == "banded" else torch.float32
    made, split = make(case), []
    g = torch.Generator().manual_seed(1)
    e = made.inputs["key_span"]
    few = torch.rand(e.shape, generator=g) < 0.03
    made.inputs["key_span"] = torch.where(few, 450.0, 4.0 * torch.rand(e.shape, generator=g)).double()
    made.inputs = {name: t.to(dtype).double() for name, t in made.inputs.items()}

    real = lives.split

    def counted(call):
        split.append(real(call))
        return split[-1]

    monkeypatch.setattr(parts.lives, "split", counted)
    truth, got = run(made, "reference", torch.float64), run(made, backend, dtype)
    assert split and split[-1] is not None
    limits = [max(part.rule.limits()) for part in split[-1]]
    assert limits[0] <= 4 + 8 + 1 and limits[1] > 100
    for name, true in truth.items():
        close = {"rtol": 1e-8, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-4}
        torch.testing.assert_close(got[name], true, **close, msg=name)


def test_all_stay_together_where_nothing_is_gained() -> None:
    q = torch.randn(1, 2, 400, 8)
    for e in (torch.full((1, 1, 400), 50.0), torch.full((1, 1, 400), 1000.0), torch.rand(1, 1, 400) * 400):
        assert lives.split(make_call(q, q, q, Rule(2, key_span=e))) is None
