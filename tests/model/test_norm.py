"""Norms: ours against torch's, values and gradients in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spanformer.model.norm import make_norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 63), (129,)])
def test_rms_equals_torchs(shape):
    torch.manual_seed(0)
    ours, theirs = make_norm("rms", shape[-1]).double(), nn.RMSNorm(shape[-1], eps=1e-6).double()
    with torch.no_grad():
        ours.weight.copy_(torch.randn(shape[-1]))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y, expected = ours(x), theirs(x)
    torch.testing.assert_close(y, expected)
    weight = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, ours.weight), weight)
    want = torch.autograd.grad(expected, (x, theirs.weight), weight)
    torch.testing.assert_close(got, want)


def test_rms_without_gradients_is_bitwise_the_same():
    norm, x = make_norm("rms", 63), torch.randn(5, 63, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found = norm(x)
    assert found.equal(norm(x))


def test_rms_of_zeros_is_zero_with_finite_gradients():
    norm, x = make_norm("rms", 4), torch.zeros(2, 4, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.eq(0).all() and x.grad.isfinite().all()


def test_rms_keeps_the_dtype_and_sums_squares_in_float32():
    x = torch.randn(3, 1000).bfloat16().requires_grad_()
    for norm in (make_norm("rms", 1000), make_norm("rms", 1000).bfloat16()):
        y = norm(x)
        assert y.dtype == torch.bfloat16
        truth = nn.functional.rms_norm(x.detach().double(), (1000,), eps=1e-6)
        torch.testing.assert_close(y.double(), truth, rtol=2**-8, atol=0)  # one rounding, to 8 bits
        assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.bfloat16


def test_layer_is_torchs_and_other_names_are_refused():
    assert isinstance(make_norm("layer", 8), nn.LayerNorm)
    with pytest.raises(ValueError, match=r"^norm is 'batch'; expected layer or rms$"):
        make_norm("batch", 8)
