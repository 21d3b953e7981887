"""Generalised advantage estimation (Schulman et al., 2016), https://arxiv.org/abs/1506.02438

    δ_t = r_t + γ V(s′_t) − V(s_t)        A_t = δ_t + γ λ A_{t+1}        return_t = A_t + V(s_t)

s′_t is the observation after step t of the same episode. V(s′_t) counts as 0 where the episode terminated; an episode
that a time limit cut goes on in s′_t, so its value counts. A stops at the end of an episode.

Shapes: N rows, T steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, ended: Tensor, gamma: float, lam: float
) -> Tensor:
    """A [N, T], all arguments [N, T]. next_value: V(s′_t). ended: terminated or cut after this step."""
    delta = reward + gamma * next_value.masked_fill(terminated, 0.0) - value
    found = torch.empty_like(delta)
    later = delta.new_zeros(len(delta))
    for t in reversed(range(delta.shape[1])):
        later = delta[:, t] + gamma * lam * later.masked_fill(ended[:, t], 0.0)
        found[:, t] = later
    return found
