"""Whole spans at their edges: the compiled kernel gives what the equation in PyTorch does in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer.attention import span_edge_gradient
from spanformer.attention.span_edge_gradient import with_span_edge_gradient
from spanformer.ops import Rule, attend, kernel

needs_kernel = pytest.mark.skipif(kernel.problem() is not None, reason=str(kernel.problem()))


def gained(dtype: torch.dtype, *, tq: int, tk: int, table: bool, cap: int, bias: bool = False, seed: int = 0) -> Tensor:
    """[H] what the edges alone add to the gradient of the spans."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v = rand(2, 4, tq, 16), rand(2, 2, tk, 16), rand(2, 2, tk, 8)
    span = torch.tensor([0.0, 3.0, 5.5, 8.0], dtype=dtype, requires_grad=True)
    vectors = rand(1, cap, 16) if table else None
    biases = rand(4, cap) if bias else None
    rule = Rule(4, span=span, ramp=4.0, reach=cap, paper_compat=True, distance_vec=vectors, distance_bias=biases)
    with torch.no_grad():
        found = attend(q, k, v, rule, backend="reference")
    out, lse = with_span_edge_gradient(found, q, k, v, rule)
    lse = torch.where(lse == -torch.inf, 0, lse)
    ((out * rand(*out.shape)).sum() + (lse * rand(*lse.shape)).sum()).backward()
    assert span.grad is not None
    return span.grad


@needs_kernel
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("table", [False, True], ids=["plain", "table"])
@pytest.mark.parametrize("sizes", [(1, 1), (17, 17), (9, 40), (33, 33)], ids=str)
@pytest.mark.parametrize("cap", [10, 64])
def test_kernel_agrees(
    sizes: tuple[int, int], table: bool, bias: bool, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tq": sizes[0], "tk": sizes[1], "table": table, "bias": bias, "cap": cap}
    truth = gained(torch.float64, **options)
    native = gained(torch.float32, **options)
    monkeypatch.setattr(kernel, "problem", lambda: "not here")
    dense = gained(torch.float32, **options)
    floor = 16 * torch.finfo(torch.float32).eps * float(truth.abs().max())
    assert (native - truth).abs().max() <= 4 * (dense - truth).abs().max() + floor
    assert sizes[1] < 10 or (truth[:2] != 0).all()
    assert truth[2] == 0  # no whole number


@needs_kernel
def test_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    real = span_edge_gradient._native
    monkeypatch.setattr(span_edge_gradient, "_native", lambda *a: called.append(1) or real(*a))
    gained(torch.float32, tq=5, tk=9, table=True, cap=12)
    assert called
    called.clear()
    gained(torch.float64, tq=5, tk=9, table=True, cap=12)
    assert not called


@pytest.mark.parametrize("table", [False, True], ids=["plain", "table"])
def test_gradient_with_distance_tables_includes_both_ramp_edges(table: bool) -> None:
    """A whole span lies between two ramps: its gradient there is that of the clamp, 1/R on both edges, which attend's
    own gradient at a span a little longer (for the far edge) and a little shorter (for the near one) has as well."""
    g = torch.Generator().manual_seed(1)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k, v = rand(1, 1, 20, 4), rand(1, 1, 20, 4), rand(1, 1, 20, 4)
    terms = {"distance_bias": rand(1, 20), "distance_vec": rand(1, 20, 4) if table else None}
    weight = rand(1, 1, 20, 4)

    def slope(z: float, edges: bool) -> float:
        span = torch.tensor([z], dtype=torch.float64, requires_grad=True)
        rule = Rule(1, span=span, ramp=4.0, reach=20, paper_compat=True, **terms)
        found = attend(q, k, v, rule, backend="reference")
        out = with_span_edge_gradient(found, q, k, v, rule).out if edges else found.out
        (out * weight).sum().backward()
        assert span.grad is not None
        return float(span.grad)

    here, eps = slope(3.0, False), 1e-7
    near, far = slope(3 - eps, False) - here, slope(3 + eps, False) - here  # d = z is on the ramp, and d = z + R
    assert slope(3.0, True) == pytest.approx(here + near + far, rel=1e-5)
