"""Playing: a policy acts in a batch of environments and records windows of steps with the memory before them.

Shapes: N rows, T steps of a window, O numbers of an observation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spanformer.rl.envs.batch import BatchEnv, Step
from spanformer.rl.memory import PolicyMemory, compact
from spanformer.rl.playing import Choice, make_player
from spanformer.rl.policy import NO_ACTION, Policy, Seen


@dataclass(frozen=True)
class Episodes:
    """The episodes that ended in a window."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    """1 or 0; only where the environment says so"""


class Window(NamedTuple):
    """Steps [N, T] of every row."""

    seen: Seen
    memory: PolicyMemory
    """before the first step"""
    action: Tensor
    log_prob: Tensor
    value: Tensor
    reward: Tensor
    terminated: Tensor
    ended: Tensor
    """terminated, or cut by a time limit"""
    next_value: Tensor
    """V of the observation after each step, within its episode; 0 where it terminated"""


class Actor:
    """Plays on where the last window ended."""

    def __init__(self, env: BatchEnv, policy: Policy, *, greedy: bool = False) -> None:
        """greedy: take the most probable action instead of a random one."""
        self.env, self.policy, self.greedy = env, policy, greedy
        self.episode = torch.zeros(env.rows, dtype=torch.int64)
        self.memory = policy.start(env.rows)
        self.player = make_player(policy, self.memory, record=False)
        self._begin(env.reset())

    def _begin(self, observation: np.ndarray) -> None:
        rows = self.env.rows
        self.observation = torch.from_numpy(observation)
        self.action, self.reward = torch.full((rows,), NO_ACTION), torch.zeros(rows)
        self.returns, self.lengths = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)

    def begin_again(self) -> None:
        """New episodes in every row."""
        self.episode = self.episode + 1
        self._begin(self.env.reset())

    def tensors(self) -> dict[str, Tensor]:
        """All but the environment and the memory."""
        return {name: getattr(self, name) for name in ("episode", "action", "reward", "returns", "lengths")}

    def load(self, tensors: dict[str, Tensor], observation: np.ndarray) -> None:
        self.observation = torch.from_numpy(observation)
        for name in self.tensors():
            setattr(self, name, tensors[name])

    def _seen(self, observation: Tensor, action: Tensor, reward: Tensor) -> Seen:
        return Seen(observation[:, None], action[:, None], reward[:, None], self.episode[:, None])

    @torch.no_grad()
    def step(self) -> tuple[Seen, Choice, Tensor, Step, Episodes]:
        """One step of every row: input, choice, actions [N], result, episodes that ended."""
        seen = self._seen(self.observation, self.action, self.reward)
        choice = self.player.step(seen)
        logits = choice.logits
        action = logits.argmax(-1) if self.greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        result = self.env.step(action.numpy())
        return seen, choice, action, result, self._advance(action, result)

    def _advance(self, action: Tensor, result: Step) -> Episodes:
        reward, ended = torch.from_numpy(result.reward), torch.from_numpy(result.terminated | result.truncated)
        self.returns, self.lengths = self.returns + reward, self.lengths + 1
        known = [float(s) for s in result.success[ended.numpy()] if s == s]
        episodes = Episodes(self.returns[ended].tolist(), self.lengths[ended].tolist(), known)
        self.observation = torch.from_numpy(result.observation)
        self.action, self.reward = action.masked_fill(ended, NO_ACTION), reward.masked_fill(ended, 0.0)
        self.episode = self.episode + ended
        self.returns, self.lengths = self.returns.masked_fill(ended, 0.0), self.lengths.masked_fill(ended, 0)
        return episodes

    @torch.no_grad()
    def _value_of_next(self, action: Tensor, result: Step) -> Tensor:
        """V [N] of the observation after this step, in its own episode; the memory stays as it is."""
        ended = torch.from_numpy(result.terminated | result.truncated)
        seen = Seen(
            torch.from_numpy(result.final)[:, None], action[:, None], torch.from_numpy(result.reward)[:, None],
            (self.episode - ended.long())[:, None],
        )  # fmt: skip
        return self.player.peek(seen).value

    def collect(self, steps: int) -> tuple[Window, Episodes]:
        """Play `steps` steps of every row."""
        start = compact(self.memory)
        self.player = make_player(self.policy, start, record=True)  # the weights may have changed
        seen, rows, ended_ones = [], [], Episodes()
        for t in range(steps):
            before, choice, action, result, over = self.step()
            # a cut episode goes on after its end, and so does the last step of the window
            asks = t == steps - 1 or result.truncated.any()
            after = self._value_of_next(action, result) if asks else torch.zeros(len(action))
            terminated, truncated = torch.from_numpy(result.terminated), torch.from_numpy(result.truncated)
            value, reward = choice.value, torch.from_numpy(result.reward)
            seen.append(before)
            rows.append((action, choice.logits, value, reward, terminated, terminated | truncated, after))
            for all_of, some in zip(vars(ended_ones).values(), vars(over).values(), strict=True):
                all_of += some
        self.memory = self.player.memory()
        together = Seen(*(torch.cat(each, 1) for each in zip(*seen, strict=True)))
        found = [torch.stack(each, 1) for each in zip(*rows, strict=True)]
        action, logits, value, reward, terminated, ended, after = found
        log_prob = logits.log_softmax(-1).gather(2, action[..., None])[..., 0]
        follows = torch.cat([value[:, 1:], after[:, -1:]], 1)  # the next step's V, unless the episode ended here
        next_value = torch.where(ended, after, follows).masked_fill(terminated, 0.0)
        return Window(together, start, action, log_prob, value, reward, terminated, ended, next_value), ended_ones


def play_episodes(env: BatchEnv, policy: Policy, count: int, *, seed: int, greedy: bool = True) -> Episodes:
    """At least `count` whole episodes, as many in each row, so that short ones do not count more often."""
    torch.manual_seed(seed)
    env.seed(seed)
    actor, each, found = Actor(env, policy, greedy=greedy), -(-count // env.rows), Episodes()
    left = np.full(env.rows, each)
    while (left > 0).any():
        _, _, _, result, over = actor.step()
        which = np.flatnonzero(result.terminated | result.truncated)
        for n, row in enumerate(which):
            if left[row] > 0:
                found.returns.append(over.returns[n])
                found.lengths.append(over.lengths[n])
                if result.success[row] == result.success[row]:
                    found.successes.append(float(result.success[row]))
            left[row] -= 1
    return found
