"""The mixture of experts against a loop over tokens in float64: values, balancing loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer.model.experts import Experts

DIM, HIDDEN = 6, 5


def make(experts: int, per_token: int, kind: str = "swiglu", balance: float = 0.3) -> Experts:
    torch.manual_seed(experts * 10 + per_token)
    return Experts(
        DIM, HIDDEN, experts=experts, per_token=per_token, kind=kind, bias=True, dropout=0.0, balance=balance
    ).double()


def by_hand(layer: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other, and all experts for each of them."""
    count, k = len(layer.experts), layer.per_token
    rows, probabilities, assigned = [], [], torch.zeros(count, dtype=x.dtype)
    for token in x.reshape(-1, DIM):
        scores = layer.router.weight @ token
        p = scores.exp() / scores.exp().sum()
        best = sorted(range(count), key=lambda e, p=p: -p[e].item())[:k]
        total = sum(p[e] for e in best) if k > 1 else 1.0
        outputs = [expert(token)[0] for expert in layer.experts]
        rows.append(sum(p[e] / total * outputs[e] for e in best))
        probabilities.append(p)
        for e in best:
            assigned[e] += 1
    share = assigned / assigned.sum()
    loss = sum(share[e] * torch.stack(probabilities)[:, e].mean() for e in range(count))
    return torch.stack(rows).view_as(x), layer.balance * count * loss


def check(layer: Experts, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    y, loss = layer(x)
    expected, expected_loss = by_hand(layer, x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(loss, expected_loss)
    weight = torch.randn_like(y)
    inputs = [x, *layer.parameters()]
    got = torch.autograd.grad((y * weight).sum() + loss, inputs)  # every parameter takes part, used or not
    want = torch.autograd.grad((expected * weight).sum() + expected_loss, inputs, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (3, 1)])
@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (4, 1), (4, 2), (5, 3), (3, 3)])
def test_equals_the_loop_over_tokens(experts, per_token, shape):
    check(make(experts, per_token), torch.randn(*shape, DIM, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_other_kinds(kind):
    check(make(3, 2, kind), torch.randn(2, 5, DIM, dtype=torch.float64))


def test_experts_without_a_token_get_gradients_of_zero():
    layer = make(4, 2)
    with torch.no_grad():  # all tokens prefer experts 1 and 3
        layer.router.weight.zero_()
        layer.router.weight[1], layer.router.weight[3] = 2.0, 1.0
    x = torch.rand(2, 5, DIM, dtype=torch.float64)
    check(layer, x)
    y, loss = layer(x)
    (y.sum() + loss).backward()
    for e in range(4):
        assert layer.experts[e].up.weight.grad.any() == (e in (1, 3))


def test_router_of_single_choices_still_learns_from_the_output():
    layer = make(3, 1, balance=0.0)
    y, loss = layer(torch.randn(2, 5, DIM, dtype=torch.float64))
    assert loss.item() == 0
    y.square().sum().backward()
    assert layer.router.weight.grad.abs().max() > 1e-6


def test_balancing_loss_is_least_when_all_are_used_alike():
    layer = make(4, 1, balance=1.0)
    x = torch.eye(DIM, dtype=torch.float64)[None, :4]
    with torch.no_grad():
        layer.router.weight.zero_()
        for e in range(4):
            layer.router.weight[e, e] = 5.0
        assert layer(x)[1].item() == pytest.approx(1.0)
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
        assert layer(x)[1].item() > 3.5


def test_autocast_routes_in_float32():
    torch.manual_seed(0)
    layer = Experts(DIM, HIDDEN, experts=4, per_token=2, kind="relu", bias=True, dropout=0.0, balance=0.1)
    x = torch.randn(2, 9, DIM)
    wide, loss = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, cast_loss = layer(x)
    assert y.dtype == torch.bfloat16 and cast_loss.dtype == torch.float32
    assert torch.equal(cast_loss, loss)  # so the same experts were chosen, with the same probabilities
    # three roundings to 8 bits (input, inner, output), and sums of a handful of terms
    torch.testing.assert_close(y.float(), wide, rtol=0.05, atol=0.05)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_bfloat16_layer_stays_bfloat16():
    layer = make(4, 2).bfloat16()
    y, loss = layer(torch.randn(2, 3, DIM, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16 and loss.dtype == torch.float32


def test_weights_per_token_counts_only_what_is_chosen():
    assert make(5, 2).weights_per_token == 5 * DIM + 2 * 3 * DIM * HIDDEN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "experts is 0; expected at least 1"),
        ({"per_token": 5}, "per_token is 5; expected 1 … 4, the number of experts"),
        ({"per_token": 0}, "per_token is 0; expected 1 … 4, the number of experts"),
        ({"balance": -1.0}, "balance is -1.0; expected at least 0 (a negative balance would reward unused experts)"),
        ({"kind": "tanh"}, "kind is 'tanh'; expected one of relu, gelu, swiglu"),
    ],
)
def test_experts_bad_arguments(change, message):
    options = {"experts": 4, "per_token": 2, "kind": "relu", "bias": True, "dropout": 0.0, "balance": 0.0} | change
    with pytest.raises(ValueError) as caught:
        Experts(DIM, HIDDEN, **options)
    assert str(caught.value) == message
