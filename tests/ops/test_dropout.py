"""Dropout: every backend drops the weights that the reference drops, also where a call is made into others."""

from __future__ import annotations

import pytest
import torch

from spanformer import Rule, Union, attend
from support.cases import Case, check

CASES = {
    "stride": Case(b=2, h=3, hkv=3, tq=40, tk=40, dropout=0.4, stride=(3,)),
    "stride, fewer queries": Case(b=2, tq=13, tk=40, dropout=0.4, stride=(3,)),
    "stride, fewer queries than classes": Case(b=2, tq=2, tk=40, dropout=0.4, stride=(5,)),
    "strides of heads": Case(b=2, h=4, hkv=2, tq=33, tk=40, dropout=0.4, stride=(1, 2, 3, 2)),
    "stride, both ways": Case(b=2, tq=20, tk=41, dropout=0.4, stride=(4,), causal=False, terms=("span",)),
    "stride, rows elsewhere": Case(b=2, tq=20, tk=41, dropout=0.4, stride=(4,), positions="rows"),
    "stride, any positions": Case(b=2, tq=20, tk=41, dropout=0.4, stride=(4,), positions="shuffled"),
    "skip": Case(b=2, tq=40, tk=40, dropout=0.4, stride=(2, 1), skip=(3,)),
    "sink_tokens": Case(b=2, tq=40, tk=40, dropout=0.4, sink_tokens=3, reach=(5,)),
    "kept, any positions": Case(b=2, tq=40, tk=40, dropout=0.4, sink_tokens=3, reach=(5,), positions="shuffled"),
    "kept, stride": Case(b=2, tq=30, tk=40, dropout=0.4, sink_tokens=3, reach=(20,), stride=(3, 2)),
    "values by distance": Case(b=2, tq=40, tk=40, dropout=0.4, stride=(3,), terms=("distance_value",)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["native", "banded"])
def test_same_weights_are_dropped(backend: str, name: str) -> None:
    check(CASES[name], backend)


@pytest.mark.parametrize("backend", ["native", "banded"])
def test_same_weights_are_dropped_in_a_union(backend: str) -> None:
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=torch.Generator().manual_seed(0)).unbind()
    rule = Union(Rule(2, reach=4), Rule(2, stride=4, skip=4))
    found = [
        attend(q, k, v, rule, backend=name, dropout=0.4, generator=torch.Generator().manual_seed(1)).out
        for name in ("reference", backend)
    ]
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
