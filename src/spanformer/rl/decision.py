"""Decision Transformer (Chen et al., 2021), https://arxiv.org/abs/2106.01345

    tokens   norm(W_R R̂_t / scale + e_t),  norm(W_s s_t + e_t),  norm(W_a a_t + e_t)       R̂_t = Σ_{t' ≥ t} r_t'
    x = blocks(tokens)        a_t ~ softmax(W x at s_t), or = tanh(W x at s_t)

One learned vector e_t for each time step serves its three tokens. States are normalised by the data's mean and standard
deviation. Without the return's token it is behaviour cloning by the same model.

Shapes: B rows, T steps, O numbers of an observation, A actions or numbers of one, P tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.memory import Cache, State
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.decoding import make_cache, read_embedded
from spanformer.model.segments import SegmentStack

SMALLEST_STD = 1e-6
"""numbers of an observation that vary less are not divided by their standard deviation"""


class Steps(NamedTuple):
    """Steps of recorded or running episodes."""

    asked: Tensor
    """[B, T] returns-to-go"""
    observation: Tensor
    """[B, T, O]"""
    action: Tensor
    """[B, T] int64, or [B, T, A]"""
    time: Tensor
    """[B, T] steps of the episode before this one"""
    padding: Tensor
    """[B, T] bool: no step"""
    episode: Tensor | None = None
    """[B, T] the number of the episode, for rows that hold several"""

    def part(self, some: slice) -> Steps:
        """Some steps of all rows."""
        episode = None if self.episode is None else self.episode[:, some]
        asked, observation, action, time, padding = (t[:, some] for t in self.always())
        return Steps(asked, observation, action, time, padding, episode)

    @staticmethod
    def join(parts: list[Steps]) -> Steps:
        """The steps of all parts, one part after the other."""
        numbers = [part.episode for part in parts if part.episode is not None]
        each = zip(*(part.always() for part in parts), strict=True)
        asked, observation, action, time, padding = (torch.cat(some, 1) for some in each)
        return Steps(asked, observation, action, time, padding, torch.cat(numbers, 1) if numbers else None)

    def always(self) -> list[Tensor]:
        """All but episode, in order."""
        return [self.asked, self.observation, self.action, self.time, self.padding]


class Predicted(NamedTuple):
    action: Tensor
    """[B, T, A] logits, or a continuous action"""
    state: State
    """pass it with the next segment"""
    penalty: Tensor


@dataclass(frozen=True)
class Task:
    """What a model must fit: sizes of the environment and of the data."""

    observation: int
    actions: int
    continuous: bool
    longest: int
    """steps of the longest episode: later steps share the last time embedding"""


class Trunk(SegmentStack, Decoder):
    """Blocks that run segments with a memory, or token by token with a KV cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "lm", tokens=False)


class DecisionTransformer(nn.Module):
    mean: Tensor
    std: Tensor
    scale: Tensor

    def __init__(self, config: ModelConfig, task: Task, *, returns: bool = True) -> None:
        """returns: whether it is asked for a return."""
        super().__init__()
        self.task = task
        self.stack = Trunk(config)
        self.time = nn.Embedding(task.longest, config.dim)
        self.ask = nn.Linear(1, config.dim) if returns else None
        self.observe, self.acted = nn.Linear(task.observation, config.dim), nn.Linear(task.actions, config.dim)
        self.norm = nn.LayerNorm(config.dim)
        self.act = nn.Linear(config.dim, task.actions)
        nn.init.normal_(self.time.weight, std=0.02)
        self.register_buffer("mean", torch.zeros(task.observation))
        self.register_buffer("std", torch.ones(task.observation))
        self.register_buffer("scale", torch.ones(()))

    @property
    def per_step(self) -> int:
        """Tokens of a step."""
        return 2 if self.ask is None else 3

    def fit_data(self, mean: Tensor, std: Tensor, scale: float) -> None:
        """Set what states are normalised by, and returns divided by."""
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std < SMALLEST_STD, 1.0, std))
        self.scale.fill_(scale)

    def tokens(self, steps: Steps) -> Tensor:
        """[B, T, P, dim]"""
        weight = self.observe.weight
        at = self.time(steps.time.clamp(max=self.task.longest - 1))
        seen = self.observe((steps.observation.to(weight) - self.mean) / self.std)
        done = (
            steps.action.to(weight) if self.task.continuous else F.one_hot(steps.action, self.task.actions).to(weight)
        )
        parts = [seen + at, self.acted(done) + at]
        if self.ask is not None:
            parts.insert(0, self.ask((steps.asked / self.scale).to(weight)[..., None]) + at)
        return self.norm(torch.stack(parts, 2))

    def forward(self, steps: Steps, state: State | None = None) -> Predicted:
        """Steps that continue those of the state."""
        tokens, p = self.tokens(steps), self.per_step
        state = self.stack.start(len(tokens)) if state is None else state
        documents = None if steps.episode is None else steps.episode.repeat_interleave(p, 1)
        padding = steps.padding.repeat_interleave(p, 1) if documents is None else None
        h, state, penalty = self.stack.run_segment(tokens.flatten(1, 2), state, documents, padding)
        return Predicted(self.read(h[:, p - 2 :: p]), state, penalty)

    def read(self, h: Tensor) -> Tensor:
        """The action [..., A] of the last block's output at the state's token."""
        found = self.act(self.stack.norm(h))
        return found.tanh() if self.task.continuous else found

    def cache(self, rows: int) -> Cache:
        """An empty KV cache for `rows` episodes."""
        return make_cache(self.stack, rows, 0, 0)

    @torch.no_grad()
    def continue_cached(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The action [B, A] at the last of the next tokens [B, n, dim]: a state's token."""
        return self.read(read_embedded(self.stack, tokens, cache)[:, -1])

    def loss(self, found: Predicted, steps: Steps) -> Tensor:
        """The mean over steps: cross-entropy in nats, or the squared error of a continuous action."""
        if self.task.continuous:
            each = (found.action - steps.action.to(found.action)).square().mean(-1)
        else:
            each = F.cross_entropy(found.action.transpose(1, 2), steps.action, reduction="none")
        real = (~steps.padding).to(each)
        return (each * real).sum() / real.sum()

    def after_step(self) -> None:
        """Clamp spans. Call it after every optimiser step."""
        self.stack.after_step()
