"""The row-sampled oracle equals the dense one, and a wrong contender is found out."""

import pytest
import torch

from spanformer import attend
from spanformer.bench.oracle import check, find_truth, oracle, sample_rows
from spanformer.bench.work import Work, make_inputs

SMALL = {"heads": 3, "dim": 8, "batch": 2}


@pytest.mark.parametrize("terms", ["plain", "distance_bias", "distance_vec"])
@pytest.mark.parametrize("streaming", [0, 40])
def test_sampled_rows_equal_the_whole(terms, streaming):
    work = Work("A", 90, terms=terms, streaming=streaming, **SMALL)
    inputs = make_inputs(work)
    rows = torch.tensor([0, 7, 33, 39])
    got = oracle(inputs, inputs.rule(), rows, torch.float64, backward=True)

    whole = make_inputs(work)
    leaves = {name: t.detach().double().requires_grad_() for name, t in whole.leaves().items()}
    double = type(whole)(work, grad=whole.grad.double(), **leaves)
    out = attend(double.q, double.k, double.v, double.rule(), backend="reference").out
    upstream = torch.zeros_like(double.grad)
    upstream[:, :, rows] = double.grad[:, :, rows]
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream), strict=True))
    torch.testing.assert_close(got["out"], out[:, :, rows].detach())
    torch.testing.assert_close(got["dq"], grads.pop("q")[:, :, rows])
    for name, grad in grads.items():
        torch.testing.assert_close(got["d" + name], grad, msg=name)


def test_rows_hold_both_ends_and_no_row_twice():
    rows = sample_rows(5000)
    assert rows[0] == 0 and rows[-1] == 4999 and len(set(rows.tolist())) == 32
    assert sample_rows(5).tolist() == [0, 1, 2, 3, 4]


def test_reference_passes_and_reports_its_errors():
    inputs = make_inputs(Work("A", 100, **SMALL))
    rule = inputs.rule()
    verdict = check(
        lambda: attend(inputs.q, inputs.k, inputs.v, rule, backend="reference").out, inputs, find_truth(inputs, rule)
    )
    assert verdict.right
    assert set(verdict.errors) == {"out", "dq", "dk", "dv", "dspan"}


@pytest.mark.parametrize("fault", ["window", "gradient", "leak", "nan"])
def test_faults_are_found(fault):
    inputs = make_inputs(Work("S", 100, **SMALL))
    rule, truth = inputs.rule(), find_truth(inputs, inputs.rule())

    def forward():
        used = rule
        if fault == "window":  # a ramp one token too long: the smallest mistake there is
            used = type(rule)(rule.heads, span=rule.span + 1, ramp=rule.ramp)
        out = attend(inputs.q, inputs.k, inputs.v, used, backend="reference").out
        if fault == "gradient":
            out = out + (inputs.v - inputs.v.detach()) * 1e-3
        if fault == "leak":
            out = out + (inputs.q.sum() - inputs.q.sum().detach()) * 1e-3
        return out * float("nan") if fault == "nan" else out

    verdict = check(forward, inputs, truth)
    assert not verdict.right
    assert "expected at most" in verdict.wrong[0]
