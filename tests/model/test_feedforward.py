"""Feed-forwards: the equations in float64, dropout on the inner activation, the count of weights."""

from __future__ import annotations

import math

import pytest
import torch

from spanformer.model.feedforward import FeedForward


def by_hand(layer: FeedForward, x: torch.Tensor) -> torch.Tensor:
    def linear(name: str, v: torch.Tensor) -> torch.Tensor:
        m = getattr(layer, name)
        return v @ m.weight.T + (m.bias if m.bias is not None else 0)

    up = linear("up", x)
    if layer.kind == "relu":
        inner = up * (up > 0)
    elif layer.kind == "gelu":
        inner = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    else:
        gate = linear("gate", x)
        inner = gate / (1 + (-gate).exp()) * up
    return linear("down", inner)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["relu", "gelu", "swiglu"])
def test_values_and_every_gradient(kind, bias):
    torch.manual_seed(0)
    layer = FeedForward(5, 7, kind=kind, bias=bias, dropout=0.0).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    y, loss = layer(x)
    expected = by_hand(layer, x)
    assert loss is None and y.shape == x.shape
    torch.testing.assert_close(y, expected)
    inputs = [x, *layer.parameters()]
    assert len(inputs) == 1 + (3 if kind == "swiglu" else 2) * (2 if bias else 1)
    weight = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_dropout_falls_on_the_inner_activation_while_training_only():
    torch.manual_seed(0)
    layer = FeedForward(1, 4000, kind="relu", bias=False, dropout=0.25)
    with torch.no_grad():
        layer.up.weight.fill_(1)
        layer.down.weight.fill_(1)
        y = layer(torch.ones(1, 1, 1))[0].item()
        kept = y * 0.75  # each kept activation counts 1 / 0.75
        assert abs(kept - round(kept)) < 1e-2 and 0.7 < kept / 4000 < 0.8
        assert layer.eval()(torch.ones(1, 1, 1))[0].item() == 4000


def test_weights_per_token_counts_the_matrices():
    assert FeedForward(5, 7, kind="relu", bias=True, dropout=0).weights_per_token == 70
    assert FeedForward(5, 7, kind="swiglu", bias=True, dropout=0).weights_per_token == 105


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tanh"}, "kind is 'tanh'; expected one of relu, gelu, swiglu"),
        ({"hidden": 0}, "dim is 5 and hidden 0; expected at least 1 each"),
        ({"dropout": 1.0}, "dropout is 1.0; expected a share of the inner activations, 0 … 1 without 1"),
    ],
)
def test_refusals(change, message):
    options = {"dim": 5, "hidden": 7, "kind": "relu", "bias": True, "dropout": 0.0} | change
    with pytest.raises(ValueError) as caught:
        FeedForward(options.pop("dim"), options.pop("hidden"), **options)
    assert str(caught.value) == message
