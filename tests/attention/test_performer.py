"""Random features of the Performer: estimates of softmax attention, orthogonal rows, redraws, the running maximum."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.attention import Full, Performer, View
from spanformer.attention.performer import orthogonal_features
from spanformer.attention.running_max import running_max
from spanformer.model.config import AttentionConfig, ModelConfig

D, DRAWS = 16, 1000
SCALE = 0.5
"""of queries and keys: an estimate's logarithm has variance |q + k|²/√D, and beyond 2 a thousand draws say little"""


def estimates(q: Tensor, k: Tensor, omega: Tensor) -> Tensor:
    """[draws] of exp(q·k/√D), for omega [draws, m, D]."""
    q, k = q / D**0.25, k / D**0.25
    return (omega @ (q + k) - (q @ q + k @ k) / 2).exp().mean(1)


@pytest.fixture(scope="module")
def draws() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    orthogonal = torch.stack([orthogonal_features(D, D, random) for _ in range(DRAWS)])
    return {"orthogonal": orthogonal, "iid": torch.randn(DRAWS, D, D, generator=random, dtype=torch.float64)}


@pytest.mark.parametrize("seed", range(4))
def test_mean_of_draws_is_the_softmax_kernel(draws: dict[str, Tensor], seed: int) -> None:
    q, k = SCALE * torch.randn(2, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = estimates(q, k, draws["orthogonal"])
    error = float(found.std()) / DRAWS**0.5
    assert abs(float(found.mean()) - math.exp(float(q @ k) / D**0.5)) <= 3 * error


def test_variance_of_orthogonal_rows_is_below_independent_ones(draws: dict[str, Tensor]) -> None:
    q, k = SCALE * torch.randn(2, 32, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ratio = [
        estimates(a, b, draws["orthogonal"]).var() / estimates(a, b, draws["iid"]).var()
        for a, b in zip(q, k, strict=True)
    ]
    assert float(torch.stack(ratio).mean()) < 0.95


def test_rows_are_orthogonal_within_blocks_and_have_lengths_of_gaussians() -> None:
    omega = orthogonal_features(2 * D + 3, D, torch.Generator().manual_seed(1))
    for block in omega.split(D):
        unit = block / block.norm(dim=1, keepdim=True)
        torch.testing.assert_close(unit @ unit.T, torch.eye(len(block), dtype=torch.float64))
    lengths = orthogonal_features(4000, D, torch.Generator().manual_seed(2)).norm(dim=1)
    assert abs(float(lengths.square().mean()) / D - 1) < 3 * math.sqrt(2 / D / 4000)  # a χ² of D degrees
    assert float(lengths.std()) > 0.5


def test_many_features_come_close_to_full_attention() -> None:
    torch.manual_seed(0)
    q, k, v = SCALE * torch.randn(3, 1, 2, 40, D, dtype=torch.float64)
    full, errors = Full(2), []
    wanted = full(q, k, v, full.rule(View()), View())
    for features in (64, 8192):
        found = Performer(2, D, features).double()(q, k, v, Performer(2, D, features).rule(), View())
        errors.append([float((a - b).abs().mean()) for a, b in zip(found, wanted, strict=True)])
    assert all(many < few / 5 for few, many in zip(*errors, strict=True))  # √128 times as close on average
    assert errors[1][1] < 0.1


def test_outliers_keep_later_tokens_exact_in_float32() -> None:
    """A key far larger than all others raises the maximum; what follows is still a mean of values."""
    torch.manual_seed(0)
    m = Performer(1, D, 64)
    q, k, v = torch.randn(3, 1, 1, 50, D)
    k[:, :, 20] *= 6
    exact = Performer(1, D, 64).double()
    exact.load_state_dict(m.state_dict())
    found = m(q, k, v, m.rule(), View())
    wanted = exact(q.double(), k.double(), v.double(), exact.rule(), View())
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33])
def test_running_max_by_document(tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    x, first = torch.randn(2, 3, tokens, generator=random), torch.randn(2, 3, generator=random)
    documents = (torch.rand(2, tokens, generator=random) < 0.3).cumsum(1)
    for ids in (documents, torch.zeros_like(documents)):
        before, found = running_max(x, first, ids)
        for b in range(2):
            for t in range(tokens):
                start = int((ids[b] == ids[b, t]).nonzero()[0])
                seen = torch.cat([first[b, :, None] if start == 0 else x[b, :, :0], x[b, :, start : t + 1]], 1)
                assert torch.equal(found[b, :, t], seen.amax(1))
                earlier = seen[:, :-1].amax(1) if seen.shape[1] > 1 else torch.full((3,), -torch.inf)
                assert torch.equal(before[b, :, t], earlier)
    assert all(map(torch.equal, running_max(x, first, None), running_max(x, first, torch.zeros_like(documents))))


def lm(kind: str) -> LM:
    torch.manual_seed(0)
    return LM(ModelConfig(vocab=13, dim=32, layers=2, heads=2, attention=AttentionConfig(kind=kind)))


def matrices(model: LM) -> list[Tensor]:
    return [m.omega.clone() for m in model.modules() if isinstance(m, Performer)]


def test_features_are_redrawn_every_so_many_steps_and_resume_from_a_checkpoint() -> None:
    model, seen = lm("1 performer(32, redraw=3) + 1 window(4)"), []
    for step in range(7):
        seen.append(matrices(model))
        if step == 4:
            resumed = lm("1 performer(32, redraw=3) + 1 window(4)")
            torch.manual_seed(99)
            resumed.load_state_dict(model.state_dict())
        model.after_step()
    changed = [not torch.equal(a[0], b[0]) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True]
    assert not torch.equal(seen[0][0], seen[0][1])  # layers differ
    for _ in range(2):
        resumed.after_step()
    assert all(map(torch.equal, matrices(resumed), seen[6]))


def test_features_stay_without_redraw_and_in_evaluation() -> None:
    model = lm("performer(32)")
    before = matrices(model)
    for _ in range(3):
        model.after_step()
    moving = lm("performer(32, redraw=1)").eval()
    kept = matrices(moving)
    for _ in range(3):
        moving(torch.zeros(1, 5, dtype=torch.long))
    assert all(map(torch.equal, matrices(model), before)) and all(map(torch.equal, matrices(moving), kept))


def test_drawing_leaves_the_global_generator_alone() -> None:
    model = lm("performer(32, redraw=1)")
    torch.manual_seed(5)
    model.after_step()
    found = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(3))


def test_negative_redraw_is_refused() -> None:
    with pytest.raises(ValueError, match="redraw is -1; expected a number of training steps, or 0 for never"):
        Performer(1, 8, 8, redraw=-1)
