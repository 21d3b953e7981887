"""Products through oneDNN: values and gradients as PyTorch's own, and PyTorch's own wherever they do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spanformer.model import linear
from spanformer.model.linear import FEW_ROWS, Linear, product, through_relu

SHAPES = [(64, 1, 7), (65, 33, 1), (2, 63, 129), (3, 129, 64)]
needs_onednn = pytest.mark.skipif(linear._onednn is None, reason="this processor's products are MKL's")


def results(call, x, weight, bias, g) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad((y * g).sum(), leaves)]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], relu: bool) -> None:
    *rows, size = shape
    torch.manual_seed(sum(shape))
    x, weight, bias = torch.randn(*rows, size), torch.randn(31, size), torch.randn(31)
    g = torch.randn(*rows, 31)

    def plain(x, weight, bias):
        y = F.linear(x, weight, bias)
        return F.relu(y) if relu else y

    truth = results(plain, *(t.double() for t in (x, weight, bias, g)))
    dense = results(plain, x, weight, bias, g)
    found = results(lambda *t: product(*t, relu=relu), x, weight, bias, g)
    for true, near, got in zip(truth, dense, found, strict=True):
        floor = 16 * torch.finfo(torch.float32).eps * float(true.abs().max())
        assert (got - true).abs().max() <= 4 * (near - true).abs().max() + floor


@needs_onednn
def test_onednn_is_used_for_plain_float32_of_enough_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(linear, "_run", lambda x, w, b, after: calls.append(after) or F.linear(x, w, b))
    layer = Linear(8, 4)
    layer(torch.randn(FEW_ROWS, 8))
    assert calls == ["none"]
    layer(torch.randn(FEW_ROWS - 1, 8))
    layer.double()(torch.randn(FEW_ROWS, 8, dtype=torch.float64))
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(FEW_ROWS, 8)).dtype == torch.bfloat16
    assert calls == ["none"]


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [None, "x", "up", "down"])
def test_through_relu_as_two_products(bias: bool, frozen: str | None) -> None:
    torch.manual_seed(0)
    up, down = Linear(33, 65, bias=bias), Linear(65, 31, bias=bias)
    x, g = torch.randn(3, 43, 33, requires_grad=frozen != "x"), torch.randn(3, 43, 31)
    for name, layer in (("up", up), ("down", down)):
        layer.requires_grad_(frozen != name)
    inputs = [t for t in (x, *up.parameters(), *down.parameters()) if t.requires_grad]
    given = g.clone()
    found = torch.autograd.grad(through_relu(x, up, down), inputs, given)
    assert torch.equal(given, g)  # what came in is not written to
    expected = torch.autograd.grad(F.linear(F.relu(F.linear(x, up.weight, up.bias)), down.weight, down.bias), inputs, g)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_views_are_taken() -> None:
    x = torch.randn(2, 16, 64).transpose(1, 2)  # [2, 64, 16], last axis not contiguous
    weight = torch.randn(5, 16)
    torch.testing.assert_close(product(x, weight), F.linear(x, weight))


def test_names_are_those_of_nn_linear() -> None:
    assert list(Linear(3, 2).state_dict()) == ["weight", "bias"]
