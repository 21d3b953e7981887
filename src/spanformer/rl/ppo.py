"""Proximal policy optimisation (Schulman et al., 2017), https://arxiv.org/abs/1707.06347

    ρ = π(a | s) / π_old(a | s)
    loss = −mean min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) + c_V mean (V − return)² / 2 − c_H mean entropy + price of spans

A minibatch is some rows with their whole window, run from the memory that they had at its start: attention gets
gradients into all steps of the window, and none into the memory.

Shapes: N rows, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from spanformer.rl.config import PPOConfig
from spanformer.rl.gae import advantages
from spanformer.rl.policy import Policy
from spanformer.rl.rollout import Window
from spanformer.train.optim import clip_global


class Losses(NamedTuple):
    """Scalars of one minibatch, or their means over an update."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    """of actions, in nats"""
    kl: Tensor
    """estimated divergence from the policy that played, in nats"""
    penalty: Tensor
    norm: Tensor
    """of the gradient"""


def ppo_loss(policy: Policy, window: Window, gain: Tensor, target: Tensor, c: PPOConfig) -> tuple[Tensor, Losses]:
    """The loss of some rows; gain: their advantages, normalised; target: their returns; [N, T] each."""
    found = policy(window.seen, window.memory)
    log_probs = found.logits.log_softmax(-1)
    change = log_probs.gather(-1, window.action[..., None])[..., 0] - window.log_prob
    ratio = change.exp()
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - c.clip, 1 + c.clip) * gain).mean()
    value = (found.value - target).square().mean() / 2
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = -surrogate + c.value * value - c.entropy * entropy + found.penalty
    kl = (ratio - 1 - change).mean()
    parts = (-surrogate, value, entropy, kl, found.penalty, torch.zeros(()))
    return loss, Losses(*(part.detach() for part in parts))


def rows_of(window: Window, index: Tensor) -> Window:
    seen, memory, *steps = window
    return Window(seen.rows(index), memory.rows(index), *(t[index] for t in steps))


def update(
    policy: Policy, optimizer: Optimizer, window: Window, c: PPOConfig, max_norm: float, set_rate: Callable[[], None]
) -> Losses:
    """Several passes over a window, in minibatches of rows. set_rate: called before each optimiser step."""
    reward = window.reward / c.reward_scale
    gain = advantages(reward, window.value, window.next_value, window.terminated, window.ended, c.gamma, c.gae)
    target = gain + window.value
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    all_parts, parameters = [], list(policy.parameters())
    for _ in range(c.epochs):
        for index in torch.randperm(len(gain)).chunk(c.minibatches):
            loss, parts = ppo_loss(policy, rows_of(window, index), gain[index], target[index], c)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = clip_global(parameters, max_norm)
            if not torch.isfinite(norm):
                raise FloatingPointError("the gradient is not finite")
            set_rate()
            optimizer.step()
            policy.after_step()
            all_parts.append(torch.stack([*parts[:-1], norm]))
    return Losses(*torch.stack(all_parts).mean(0))
