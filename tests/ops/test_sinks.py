"""Sinks that are not finite: every backend gives what the reference gives."""

from __future__ import annotations

import math

import pytest
import torch

from spanformer import Rings, Rule, attend, attend_rings

BACKENDS = ("banded", "native")
NAMES = ("out", "lse", "dq", "dk", "dv", "dsink")


def results(backend: str, sink: float, dtype: torch.dtype, **terms) -> dict[str, torch.Tensor]:
    """out, lse and gradients; head 0 has the sink, head 1 an ordinary one."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 40, 8, generator=g).to(dtype).requires_grad_() for _ in range(3)]
    sinks = torch.tensor([sink, 0.3], requires_grad=True)
    out, lse = attend(*inputs, Rule(2, sink_logits=sinks, **terms), backend=backend)
    grads = torch.autograd.grad(out.float().sum() + torch.where(lse == -math.inf, 0, lse).sum(), [*inputs, sinks])
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", [{}, {"reach": 3}, {"span": torch.tensor([5.5, 2.0]), "ramp": 4.0}], ids=str)
@pytest.mark.parametrize("sink", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_or_infinite_sink_makes_its_head_nan(backend: str, sink: float, terms: dict, dtype: torch.dtype) -> None:
    true, got = results("reference", sink, dtype, **terms), results(backend, sink, dtype, **terms)
    for name in NAMES:
        head, other = (true[name][..., 0], true[name][..., 1]) if name == "dsink" else true[name].unbind(1)
        assert head.isnan().all() and other.isfinite().all()
        torch.testing.assert_close(got[name].float(), true[name].float(), atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.parametrize("sink", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_or_infinite_sink_where_no_key_is_seen(backend: str, sink: float) -> None:
    true, got = results("reference", sink, torch.float32, reach=0), results(backend, sink, torch.float32, reach=0)
    for name in ("out", "lse", "dq", "dk", "dsink"):
        torch.testing.assert_close(got[name], true[name], equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sink_of_minus_infinity_is_none(backend: str) -> None:
    true, got = (results(name, -math.inf, torch.float32) for name in ("reference", backend))
    for name in NAMES:
        torch.testing.assert_close(got[name], true[name])


@pytest.mark.parametrize("sink", [math.nan, math.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_or_infinite_sink_in_rings(backend: str, sink: float) -> None:
    keys = torch.randn(1, 16, 8)
    rings = Rings(keys, keys, torch.tensor([8, 8]), torch.tensor([7]))
    rule = Rule(2, sink_logits=torch.tensor([sink, 0.3]), reach=8)
    out, lse = attend_rings(torch.randn(1, 2, 1, 8), rings, rule, backend=backend)
    assert out[:, 0].isnan().all() and lse[:, 0].isnan().all() and out[:, 1].isfinite().all()
