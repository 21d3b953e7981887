"""Positions that are added to hidden states: the papers' equations, any place, and where a table ends."""

from __future__ import annotations

import math
import re

import pytest
import torch

from spanformer.position import Learned, Sinusoidal


@pytest.mark.parametrize("dim", [1, 5, 8])
@pytest.mark.parametrize("start", [0, 7, 10_000_000])
def test_sinusoids_equal_the_equation(dim: int, start: int) -> None:
    x = torch.randn(2, 3, dim, dtype=torch.float64)
    got = Sinusoidal(dim, 500.0).embed(x, start)
    for t in range(3):
        for c in range(dim):
            wave = (math.sin, math.cos)[c % 2]((start + t) * 500.0 ** (-2 * (c // 2) / dim))
            torch.testing.assert_close(
                got[:, t, c], x[:, t, c] + wave, rtol=0, atol=1e-7
            )  # angles of 1e7 keep 9 digits
    assert Sinusoidal(dim).embed(x.bfloat16(), 3).dtype == torch.bfloat16


def test_places_may_be_given() -> None:
    x, at = torch.randn(2, 3, 8), torch.tensor([[4, 0, 9], [2, 2, 5]])
    for module in (Sinusoidal(8), Learned(8, 10)):
        rows = [torch.stack([module.embed(x[b, t].view(1, 1, 8), int(at[b, t]))[0, 0] for t in range(3)])
                for b in range(2)]  # fmt: skip
        torch.testing.assert_close(module.embed(x, at), torch.stack(rows))
        torch.testing.assert_close(module.embed(x, torch.arange(3)), module.embed(x, 0))


def test_learned_table_and_its_gradient() -> None:
    module, x = Learned(4, 9).double(), torch.randn(2, 3, 4, dtype=torch.float64)
    out = module.embed(x, 6)
    torch.testing.assert_close(out, x + module.weight[6:9])
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, module.weight, weight)
    torch.testing.assert_close(grad[6:], weight.sum(0))
    assert not grad[:6].any()


def test_table_ends() -> None:
    module = Learned(4, 9)
    for start in (7, torch.tensor([7, 8, 9])):
        message = (
            "a token is at position 9 of its text, and learned positions end at 8; increase their length, start a "
            "new text, or use sinusoidal or relative positions"
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            module.embed(torch.randn(1, 3, 4), start)
    with pytest.raises(ValueError, match="a token is at position -1"):
        module.embed(torch.randn(1, 3, 4), torch.tensor([-1, 0, 1]))
    assert module.embed(torch.randn(1, 0, 4), 99).shape == (1, 0, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sinusoidal(0), "dim is 0 and base 10000.0; expected a dim of at least 1 and a positive base"),
        (lambda: Learned(4, 0), "dim is 4 and length 0; expected at least 1 each"),
    ],
)
def test_absolute_positions_bad_arguments(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
