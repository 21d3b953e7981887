"""Advantages against the definition, in float64."""

from __future__ import annotations

import pytest
import torch

from spanformer.rl.gae import advantages

N, T = 4, 23


def oracle(reward, value, next_value, terminated, ended, gamma, lam):
    """A_t = Σ_k (γ λ)^k δ_{t+k} up to the end of the episode or of the window, written from the definition."""
    found = torch.zeros(N, T, dtype=torch.float64)
    for n in range(N):
        for t in range(T):
            for k in range(T - t):
                s = t + k
                follow = 0.0 if terminated[n, s] else float(next_value[n, s])
                found[n, t] += (gamma * lam) ** k * (float(reward[n, s]) + gamma * follow - float(value[n, s]))
                if ended[n, s]:
                    break
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)])
def test_advantages_are_the_definition(gamma: float, lam: float) -> None:
    g = torch.Generator().manual_seed(0)
    reward, value, next_value = (torch.randn(N, T, generator=g, dtype=torch.float64) for _ in range(3))
    terminated = torch.rand(N, T, generator=g) < 0.15
    ended = terminated | (torch.rand(N, T, generator=g) < 0.15)
    assert (ended & ~terminated).any() and terminated.any()
    arguments = (reward, value, next_value, terminated, ended, gamma, lam)
    assert (advantages(*arguments) - oracle(*arguments)).abs().max() < 1e-12


def test_value_after_a_terminated_step_does_not_count() -> None:
    nothing, over = torch.zeros(1, 2), torch.tensor([[True, False]])
    wild = torch.tensor([[float("nan"), 2.0]])
    assert advantages(nothing, nothing, wild, over, over, 1.0, 1.0).tolist() == [[0.0, 2.0]]
