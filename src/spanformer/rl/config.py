"""The sections of a run file for PPO, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from spanformer.model.config import ModelConfig
from spanformer.train.optim import OptimConfig


@dataclass(frozen=True)
class EnvConfig:
    id: str = "t_maze"
    """t_maze, memory_chain, or an id that gymnasium knows, such as CartPole-v1"""
    length: int = 50
    """for t_maze and memory_chain: steps between the cue and the answer"""
    count: int = 16
    """environments that run side by side"""


@dataclass(frozen=True)
class PPOConfig:
    policy: Literal["transformer", "lstm", "mlp"] = "transformer"
    """transformer: the stack of [model]; lstm, mlp: baselines of width model.dim"""
    window: int = 128
    """steps of each environment between two updates; gradients stay within them"""
    updates: int = 500
    """number of windows"""
    epochs: int = 3
    """passes over each window"""
    minibatches: int = 4
    """pieces of a pass, each of some environments with their whole window"""
    gamma: float = 0.99
    """discount of rewards"""
    gae: float = 0.95
    """λ of generalised advantage estimation"""
    reward_scale: float = 1.0
    """learning divides rewards by this; choose it so that returns are of about 1 to 10"""
    clip: float = 0.2
    """largest change of an action's probability ratio that still has a gradient"""
    entropy: float = 0.01
    """weight of the entropy of actions"""
    value: float = 0.5
    """weight of the value loss"""
    save_every: int = 50
    """updates between checkpoints; 0: at the end only"""
    keep: int = 2
    """number of latest checkpoints to keep"""
    eval_episodes: int = 200
    """episodes of the final evaluation, with the most probable actions; 0: none"""
    seed: int = 1
    threads: int = 0
    """CPU threads; 0: PyTorch's default"""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """write TensorBoard files beside events.jsonl; auto: if the package is installed"""

    def __post_init__(self) -> None:
        for name in ("window", "updates", "epochs", "minibatches", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"ppo.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("save_every", "eval_episodes", "threads", "seed", "clip", "entropy", "value"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"ppo.{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        if not 0 < self.reward_scale < math.inf:
            raise ValueError(f"ppo.reward_scale is {self.reward_scale}; expected a finite number above 0")
        for name in ("gamma", "gae"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"ppo.{name} is {getattr(self, name)}; expected 0 … 1")


@dataclass(frozen=True)
class RLConfig:
    out: str = ""
    """run folder for events and checkpoints; empty: out/ and the name of the run file"""
    resume: bool = False
    """continue the run in that folder, if it holds one"""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.env.count < 1 or self.env.count % self.ppo.minibatches:
            raise ValueError(
                f"env.count is {self.env.count}; expected a multiple of ppo.minibatches, {self.ppo.minibatches}"
            )
        if self.model.kind != "lm" or self.model.stack == "reversible" or self.model.depth.kind == "exits":
            raise ValueError(
                "a policy needs model.kind 'lm', a residual or universal stack and no exits; change the [model] section"
            )
        position = self.model.position
        if position.absolute and position.kind != "none":
            raise ValueError(
                f"model.position.kind is {position.kind!r}; expected a relative one, such as transformer_xl or "
                "rotary, since episodes begin anywhere in a policy's memory"
            )
        if position.log_scale:
            raise ValueError(
                f"model.position.log_scale is {position.log_scale}; expected 0, since episodes begin anywhere in a "
                "policy's memory"
            )
