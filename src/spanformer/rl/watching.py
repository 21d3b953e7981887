"""One episode of a policy, and what each of its steps attended to.

Shapes: T steps, H heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.inspect.attention_maps import LONGEST, watched_maps
from spanformer.rl.envs.batch import BatchEnv
from spanformer.rl.policy import Policy, Seen
from spanformer.rl.rollout import Actor


class Watched(NamedTuple):
    env: str
    maps: list[Tensor]
    """[layers] of [H, T, T]: the weight of step j for the decision at step i"""
    actions: list[int]
    episode_return: float
    success: float
    """1 or 0; NaN if the environment does not say"""


def watch_episode(policy: Policy, env: BatchEnv, *, seed: int) -> Watched:
    """Play one episode in an environment of one row, with the most probable actions; longer ones are cut."""
    stack = policy.stack()
    if stack is None:
        raise ValueError("the policy is no transformer; expected one with attention")
    env.seed(seed)
    actor, seen, actions, total, success = Actor(env, policy.eval(), greedy=True), [], [], 0.0, math.nan
    for _ in range(LONGEST):
        before, _, action, result, _ = actor.step()
        seen.append(before)
        actions.append(int(action))
        total += float(result.reward[0])
        if result.terminated[0] or result.truncated[0]:
            success = float(result.success[0])
            break
    whole = Seen(*(torch.cat(each, 1) for each in zip(*seen, strict=True)))
    (maps,) = watched_maps(
        policy, [[block.attention for block in stack.layers()]], lambda: policy(whole, policy.start(1))
    )
    return Watched(env.name, maps, actions, total, success)
