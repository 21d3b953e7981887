"""Muon's step against its equations in float64, and against torch.optim.Muon, which iterates in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spanformer.core import processor
from spanformer.train.muon import COEFFICIENTS, ITERATIONS, Muon, orthogonalise
from spanformer.train.optim import OptimConfig, make_optimizer

SHAPES = [(16, 16), (12, 40), (40, 12), (1, 7), (7, 1), (1, 1)]


def by_singular_values(matrix: Tensor) -> Tensor:
    """The iteration acts on each singular value alone: s ← a·s + b·s³ + c·s⁵. In float64, with no product of X."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s, (a, b, c) = s / s.norm(), COEFFICIENTS
    for _ in range(ITERATIONS):
        s = a * s + b * s**3 + c * s**5
    return u * s @ v


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_orthogonalise_acts_on_singular_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64).to(dtype)
    found = orthogonalise(matrix, dtype)
    assert found.dtype == dtype and found.shape == shape
    # An iteration multiplies an error by at most its slope, 3.4445, and three products add their roundings
    allowed = 3 * torch.finfo(dtype).eps * sum(COEFFICIENTS[0] ** n for n in range(ITERATIONS))
    assert torch.linalg.matrix_norm(found.double() - by_singular_values(matrix), 2) < allowed
    assert torch.linalg.svdvals(found).max() < 1.25


def test_orthogonalise_leaves_zeros_and_its_input_alone() -> None:
    for matrix in (torch.zeros(3, 5), torch.randn(5, 3)):
        before = matrix.clone()
        assert orthogonalise(matrix, torch.float32).isfinite().all()
        assert torch.equal(matrix, before)
    assert not orthogonalise(torch.zeros(3, 5), torch.float32).any()


def steps(make, shape: tuple[int, int], count: int = 3) -> tuple[Tensor, Tensor]:
    """The weights before and after some steps on the same gradients."""
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(shape))
    before, optimizer = p.detach().clone(), make([p])
    for _ in range(count):
        p.grad = torch.randn(shape)
        optimizer.step()
    return before, p.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_torchs_muon_within_bfloat16(shape: tuple[int, int], dtype: torch.dtype) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.2}
    before, ours = steps(lambda ps: Muon(ps, dtype=dtype, **settings), shape)
    same, theirs = steps(lambda ps: torch.optim.Muon(ps, adjust_lr_fn="match_rms_adamw", **settings), shape)
    assert torch.equal(before, same)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        return
    # 8 bits: 0.4 % each for the rounding of X, XXᵀ and its square, five times; found here: up to 2 %
    assert torch.linalg.matrix_norm(ours - theirs, 2) < 15 * 2**-8 * torch.linalg.matrix_norm(ours - before, 2)


def beside_adamw(matrices: list[nn.Parameter]) -> Optimizer:
    named = {f"blocks.{n}": p for n, p in enumerate(matrices)} | {"scale": nn.Parameter(torch.ones(1))}
    return make_optimizer(named.items(), OptimConfig(kind="muon"), lambda _: False)


def test_step_by_hand() -> None:
    torch.manual_seed(2)
    p = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    w, b, optimizer = p.detach().clone(), torch.zeros(6, 4).double(), Muon([p], 0.1, 0.8, 0.3, torch.float64)
    for _ in range(3):
        p.grad = torch.randn_like(p)
        optimizer.step()
        b = 0.8 * b + 0.2 * p.grad
        w = (1 - 0.1 * 0.3) * w - 0.1 * 0.2 * 6**0.5 * by_singular_values(0.8 * b + 0.2 * p.grad)
    torch.testing.assert_close(p.detach(), w)
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], b)


@pytest.mark.parametrize("make", [Muon, beside_adamw])
def test_no_gradient_no_step_and_a_closure_is_called(make) -> None:
    p, idle = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = make([p, idle])

    def closure() -> float:
        loss = (p * torch.eye(2)).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2
    assert torch.equal(idle, torch.ones(2, 2)) and idle not in optimizer.state and not torch.equal(p, idle)


def test_parameter_that_is_not_a_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a parameter given to Muon has shape \(3,\); expected a matrix"):
        Muon([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize("units", [True, False])
def test_processor_chooses_the_dtype(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    monkeypatch.setattr(processor, "multiplies_bfloat16", lambda: units)
    assert Muon([nn.Parameter(torch.ones(2, 2))]).dtype == (torch.bfloat16 if units else torch.float32)
    assert Muon([nn.Parameter(torch.ones(2, 2))], dtype=torch.float64).dtype == torch.float64
