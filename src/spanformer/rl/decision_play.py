"""A Decision Transformer acts: it is asked for a return, and each reward is subtracted from what is still asked.

window    the last K steps are run anew at each step, as in training. A KV cache would hold keys of steps that read
          others before them, which training never had.
episode   a KV cache over the whole episode; equal to one pass over it, as training with memory is.

Shapes: N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spanformer.rl.decision import DecisionTransformer, Steps
from spanformer.rl.envs.batch import BatchEnv

Asked = Callable[[np.ndarray], np.ndarray]
"""the returns [N] to ask for, by the first observations [N, O]"""


class Context(Protocol):
    def act(self, asked: Tensor, observation: Tensor) -> Tensor:
        """The prediction [N, A] for the next step."""
        ...

    def did(self, action: Tensor) -> None:
        """What was done in that step."""
        ...


class Window:
    """The last `length` steps of every row."""

    def __init__(self, model: DecisionTransformer, rows: int, length: int) -> None:
        self.model, self.rows, self.length = model, rows, length
        self.steps: list[Steps] = []
        self.time = 0

    def act(self, asked: Tensor, observation: Tensor) -> Tensor:
        self.steps.append(one_step(self.model, asked, observation, self.time))
        self.steps = self.steps[-self.length :]
        self.time += 1
        return self.model(Steps.join(self.steps)).action[:, -1]

    def did(self, action: Tensor) -> None:
        self.steps[-1] = self.steps[-1]._replace(action=action[:, None])


class Cached:
    """The whole episode, in a KV cache."""

    def __init__(self, model: DecisionTransformer, rows: int) -> None:
        self.model, self.cache, self.time = model, model.cache(rows), 0
        self.now: Steps | None = None
        self.waiting: Tensor | None = None
        """[N, 1, dim] the token of the last action, which the cache has not read"""

    def act(self, asked: Tensor, observation: Tensor) -> Tensor:
        self.now = one_step(self.model, asked, observation, self.time)
        self.time += 1
        tokens = self.model.tokens(self.now)[:, 0, :-1]
        tokens = tokens if self.waiting is None else torch.cat([self.waiting, tokens], 1)
        return self.model.continue_cached(tokens, self.cache)

    def did(self, action: Tensor) -> None:
        assert self.now is not None
        self.waiting = self.model.tokens(self.now._replace(action=action[:, None]))[:, 0, -1:]


def one_step(model: DecisionTransformer, asked: Tensor, observation: Tensor, time: int) -> Steps:
    """A step [N, 1] whose action is not known yet."""
    n, task = len(asked), model.task
    action = torch.zeros(n, 1, task.actions) if task.continuous else torch.zeros(n, 1, dtype=torch.int64)
    at, padding = torch.full((n, 1), time), torch.zeros(n, 1, dtype=torch.bool)
    return Steps(asked[:, None], observation[:, None], action, at, padding)


class Outcome(NamedTuple):
    """Whole episodes, one row each."""

    asked: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    success: np.ndarray
    """1 or 0; NaN: unknown"""
    first: np.ndarray
    """[E, O] the first observation"""


@torch.no_grad()
def play(
    model: DecisionTransformer, env: BatchEnv, new_context: Callable[[int], Context], asked: Asked, episodes: int, *,
    seed: int, greedy: bool = True, on_episode: Callable[[int], None] = lambda done: None,
) -> Outcome:  # fmt: skip
    """At least `episodes` whole episodes; all rows begin one together, so that each row plays as many."""
    torch.manual_seed(seed)
    env.seed(seed)
    rounds = -(-episodes // env.rows)
    found = []
    for n in range(rounds):
        found.append(_round(model, env, new_context(env.rows), asked, greedy))
        on_episode((n + 1) * env.rows)
    return Outcome(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _round(model: DecisionTransformer, env: BatchEnv, context: Context, asked: Asked, greedy: bool) -> Outcome:
    """One episode of every row. Rows that are over play on, and nothing of that counts."""
    first = env.reset()
    want = asked(first).astype(np.float64)
    observation, still, over = first, want.copy(), np.zeros(env.rows, bool)
    returns, lengths, success = np.zeros(env.rows), np.zeros(env.rows, np.int64), np.full(env.rows, np.nan)
    while not over.all():
        found = context.act(torch.from_numpy(still), torch.from_numpy(observation))
        action = chosen(model, found, greedy)
        context.did(action)
        result = env.step(action.numpy())
        still, returns = still - result.reward, returns + np.where(over, 0.0, result.reward)
        lengths, success = lengths + ~over, np.where(over, success, result.success)
        over = over | result.terminated | result.truncated
        observation = result.observation
    return Outcome(want, returns, lengths, success, first)


def chosen(model: DecisionTransformer, found: Tensor, greedy: bool) -> Tensor:
    """Actions [N], or [N, A]."""
    if model.task.continuous:
        return found
    return found.argmax(-1) if greedy else torch.multinomial(found.softmax(-1), 1)[:, 0]
