"""Policies: an actor and a critic over a stack with memory, and the baselines LSTM and MLP.

Stabilizing Transformers for Reinforcement Learning (Parisotto et al., 2019), https://arxiv.org/abs/1910.06764

    h_t = W [o_t, one-hot a_{t−1}, r_{t−1}]     x = core(h, memory)     π = softmax(W_π x)     V = w_V · x

A core with memory gets the previous action and reward, both 0 at the first step of an episode. The MLP gets o_t alone:
otherwise it could remember by its own actions.

Shapes: B rows, T steps, O numbers of an observation, A actions.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention import AdaptiveSpan
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.segments import SegmentStack
from spanformer.rl.lstm import LSTMCore
from spanformer.rl.memory import Carried, PolicyMemory, Segments

NO_ACTION = -1
"""the previous action of an episode's first step"""


class Seen(NamedTuple):
    """The input of a policy."""

    observation: Tensor
    """[B, T, O] float32"""
    action: Tensor
    """[B, T] the previous action, or NO_ACTION"""
    reward: Tensor
    """[B, T] float32, the previous reward"""
    episode: Tensor
    """[B, T] the number of the episode, growing along a row"""

    def rows(self, index: Tensor) -> Seen:
        return Seen(*(t[index] for t in self))


class Decision(NamedTuple):
    logits: Tensor
    """[B, T, A]"""
    value: Tensor
    """[B, T]"""
    memory: PolicyMemory
    penalty: Tensor
    """a term of the loss: spans that learn have a price"""


class PolicyStack(SegmentStack, Decoder):
    """Blocks without embedding and output layer: by segments in training, by a KV cache in acting (playing.py)."""

    def spans_modules(self) -> list[AdaptiveSpan]:
        return self._learned  # asked for at every step, and the blocks never change

    @cached_property
    def _learned(self) -> list[AdaptiveSpan]:
        return super().spans_modules()


class TransformerCore(nn.Module):
    """A stack of blocks with a segment memory; [model] decides its kind, such as gated blocks."""

    remembers = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stack = PolicyStack(config, "lm", tokens=False)

    def start(self, rows: int) -> Segments:
        return Segments(self.stack.start(rows))

    def forward(self, h: Tensor, episode: Tensor, memory: Segments) -> tuple[Tensor, Segments, Tensor]:
        x, state, penalty = self.stack.run_segment(h, memory.state, episode)
        return self.stack.norm(x), Segments(state), penalty


class MLPCore(nn.Module):
    """Two layers without memory."""

    remembers = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.dim
        self.layers = nn.Sequential(nn.Tanh(), nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d), nn.Tanh())

    def start(self, rows: int) -> Carried:
        return Carried({})

    def forward(self, h: Tensor, episode: Tensor, memory: Carried) -> tuple[Tensor, Carried, Tensor]:
        return self.layers(h), memory, h.new_zeros(())


CORES = {"transformer": TransformerCore, "lstm": LSTMCore, "mlp": MLPCore}


class Policy(nn.Module):
    def __init__(self, core: str, config: ModelConfig, observation: int, actions: int) -> None:
        super().__init__()
        self.observation, self.actions = observation, actions
        self.core = CORES[core](config)
        self.encode = nn.Linear(observation + (actions + 1 if self.core.remembers else 0), config.dim)
        self.actor, self.critic = nn.Linear(config.dim, actions), nn.Linear(config.dim, 1)
        with torch.no_grad():  # all actions begin nearly equally probable
            self.actor.weight.mul_(0.01)
            self.actor.bias.zero_()

    def start(self, rows: int) -> PolicyMemory:
        """The memory before the first step."""
        return self.core.start(rows)

    def forward(self, seen: Seen, memory: PolicyMemory) -> Decision:
        found, after, penalty = self.core(self.embed(seen), seen.episode, memory)
        return Decision(*self.decide(found), after, penalty)

    def embed(self, seen: Seen) -> Tensor:
        """The core's input [B, T, dim]."""
        x = seen.observation
        if self.core.remembers:
            acted = F.one_hot(seen.action + 1, self.actions + 1)[..., 1:].to(x)  # all 0 for NO_ACTION
            x = torch.cat([x, acted, seen.reward[..., None]], -1)
        return self.encode(x)

    def decide(self, found: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, T, A] and value [B, T] of the core's output [B, T, dim]."""
        return self.actor(found), self.critic(found)[..., 0]

    def stack(self) -> PolicyStack | None:
        """The transformer, if it is one."""
        return self.core.stack if isinstance(self.core, TransformerCore) else None

    def after_step(self) -> None:
        """Clamp spans. Call it after every optimiser step."""
        if (stack := self.stack()) is not None:
            stack.after_step()
