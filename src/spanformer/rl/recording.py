"""Recording episodes: a player acts in a batch of environments, and whole episodes are kept.

Shapes: N rows, O numbers of an observation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from spanformer.rl.envs.batch import BatchEnv, Step
from spanformer.rl.policy import Policy
from spanformer.rl.rollout import Actor
from spanformer.rl.trajectories import About, Trajectories

ROWS = 50
"""environments side by side"""


class Played(NamedTuple):
    """One step of every row."""

    observation: np.ndarray
    """[N, O], before the step"""
    action: np.ndarray
    result: Step


Player = Callable[[], Played]


def random_player(env: BatchEnv, seed: int, *, continuous: bool = False) -> Player:
    """Every action is as probable as the others; continuous ones are drawn from −1 … 1."""
    random, observation = np.random.default_rng(seed), env.reset()

    def play() -> Played:
        nonlocal observation
        before, action = observation, random.integers(0, env.actions, env.rows)
        if continuous:
            action = random.uniform(-1, 1, (env.rows, env.actions)).astype(np.float32)
        result = env.step(action)
        observation = result.observation
        return Played(before, action, result)

    return play


def policy_player(env: BatchEnv, policy: Policy, *, greedy: bool) -> Player:
    actor = Actor(env, policy, greedy=greedy)

    def play() -> Played:
        seen, _, action, result, _ = actor.step()
        return Played(seen.observation[:, 0].numpy(), action.numpy(), result)

    return play


class Episode:
    """The steps of an episode under way."""

    def __init__(self) -> None:
        self.observation: list[np.ndarray] = []
        self.action: list[np.ndarray] = []
        self.reward: list[np.float32] = []


def record(
    play: Player, rows: int, count: int, about: About, on_episode: Callable[[int], None] = lambda done: None
) -> Trajectories:  # fmt: skip
    """`count` whole episodes, as many of each row if rows divides count, so that short ones are no more frequent."""
    each, under_way = -(-count // rows), [Episode() for _ in range(rows)]
    over: list[list[tuple[Episode, bool, np.float32, np.ndarray]]] = [[] for _ in range(rows)]
    while min(map(len, over)) < each:
        observation, action, result = play()
        for n, episode in enumerate(under_way):
            if len(over[n]) == each:
                continue
            episode.observation.append(observation[n].copy())
            episode.action.append(action[n])
            episode.reward.append(result.reward[n])
            if result.terminated[n] or result.truncated[n]:
                over[n].append((episode, bool(result.terminated[n]), result.success[n], result.final[n].copy()))
                under_way[n] = Episode()
        on_episode(sum(map(len, over)))
    found = [over[n][k] for k in range(each) for n in range(rows)][:count]
    kind = np.float32 if about.continuous else np.int64
    episodes = [episode for episode, *_ in found]
    return Trajectories(
        about,
        np.array([o for e in episodes for o in e.observation], np.float32),
        np.array([a for e in episodes for a in e.action], kind),
        np.array([r for e in episodes for r in e.reward], np.float32),
        np.array([len(e.reward) for e in episodes]),
        np.array([terminated for _, terminated, *_ in found]),
        np.array([success for *_, success, _ in found], np.float32),
        np.array([final for *_, final in found], np.float32),
    )


def join(parts: list[Trajectories], about: About) -> Trajectories:
    """The episodes of all parts."""
    names = ("observation", "action", "reward", "lengths", "terminated", "success", "final")
    return Trajectories(about, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def seed_player(env: BatchEnv, seed: int) -> None:
    torch.manual_seed(seed)
    env.seed(seed)
