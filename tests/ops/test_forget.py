"""Forget gates are rewritten before any backend runs. Every backend is compared with the dense equation in float64, and
in float32 with the error of a key bias."""

from __future__ import annotations

import pytest
import torch

from spanformer import Rule, attend
from support.cases import Case, make, run

CASES = [
    Case(b=2, h=4, hkv=2, tq=63, tk=111, terms=("forget",)),
    Case(b=2, h=4, hkv=2, tq=63, tk=111, terms=("head_forget", "sink_logits", "key_bias")),
    Case(tq=129, tk=129, terms=("head_forget", "padding", "sink_logits"), reach=(20, 200)),
    Case(b=2, tq=63, tk=111, terms=("forget", "span", "distance_vec", "key_span"), positions="rows"),
    Case(b=2, tq=17, tk=63, terms=("head_forget", "sink_logits"), sink_tokens=3, reach=(5, 9)),
    Case(b=2, tq=17, tk=63, terms=("forget", "documents", "blocks"), causal=False),
    Case(tq=1, tk=1, terms=("forget", "sink_logits")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_forget_equals_the_dense_equation(case: Case) -> None:
    made = make(case)
    truth, got = run(made, "reference", torch.float64), run(made, "banded", torch.float64)
    for name in truth:
        torch.testing.assert_close(got[name], truth[name], rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_float32_error_grows_with_the_total_log_gate(case: Case) -> None:
    """A key bias of size c is rounded to c · eps, and so are the scores it is added to."""
    made = make(case)
    made.inputs = {name: t.float().double() for name, t in made.inputs.items()}
    truth, got = run(made, "reference", torch.float64), run(made, "auto", torch.float32)
    gates = made.inputs["forget"].detach()
    eps = torch.finfo(torch.float32).eps * float((gates[..., 0] - gates[..., -1]).max() + 16)
    for name, true in truth.items():
        assert (got[name] - true).abs().max() <= 4 * eps * max(1.0, float(true.abs().max())), name


def test_dropout_drops_the_same_weights() -> None:
    made = make(Case(b=2, tq=33, tk=33, terms=("forget",), dropout=0.3))
    truth, got = run(made, "reference", torch.float64), run(made, "banded", torch.float64)
    torch.testing.assert_close(got["out"], truth["out"])


def test_bad_shapes_are_refused() -> None:
    q = torch.randn(2, 2, 5, 4)
    with pytest.raises(ValueError, match=r"forget has shape \[2, 3, 5\] .* expected \[1 or B, 1 or 2, Tk\]"):
        Rule(2, forget=torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"forget has shape \[2, 1, 4\]; expected \[1 or 2, 1 or 2, 5\]"):
        attend(q, q, q, Rule(2, forget=torch.zeros(2, 1, 4)))
    with pytest.raises(ValueError, match="forget is given with 3 keys and 5 queries; expected at least as many keys"):
        attend(q, q[:, :, :3], q[:, :, :3], Rule(2, causal=False, forget=torch.zeros(2, 1, 3)))
