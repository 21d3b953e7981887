"""The sections of a run file for learning from recorded episodes, as plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from spanformer.model.config import ModelConfig
from spanformer.train.optim import OptimConfig


@dataclass(frozen=True)
class ImitateConfig:
    data: str = ""
    """.npz file of recorded episodes; `spanformer rl collect` writes one"""
    method: Literal["decision", "cloning"] = "decision"
    """decision: a Decision Transformer, asked for a return; cloning: the same model without the return's token"""
    top: float = 1.0
    """learn from the episodes of the highest returns only, which hold this share of the steps: %BC with cloning"""
    window: int = 20
    """steps of an example, each of 3 tokens (2 with cloning)"""
    context: Literal["window", "episode"] = "window"
    """window: examples are windows of episodes, and play runs the last `window` steps anew at each step; episode: whole
    episodes in segments of `window` steps with memory, and play keeps a KV cache"""
    batch: int = 64
    """examples of a step"""
    steps: int = 2000
    """optimiser steps; the warm-up lasts at most a tenth of them"""
    scale: float = 0.0
    """returns are divided by it; 0: the largest return-to-go of the data"""
    targets: tuple[float, ...] = ()
    """returns to ask for in the final evaluation; empty: the best return of the data"""
    eval_episodes: int = 200
    """episodes of the final evaluation for each target; 0: none"""
    sample: bool = False
    """in the final evaluation, draw discrete actions by their probabilities, as the recorded policies did, instead of
    taking the most probable one"""
    log_every: int = 50
    """steps between rows of events.jsonl"""
    save_every: int = 500
    """steps between checkpoints; 0: at the end only"""
    keep: int = 2
    """number of latest checkpoints to keep"""
    seed: int = 1
    threads: int = 0
    """CPU threads; 0: PyTorch's default"""
    tensorboard: Literal["auto", "on", "off"] = "auto"
    """write TensorBoard files beside events.jsonl; auto: if the package is installed"""

    def __post_init__(self) -> None:
        for name in ("window", "batch", "steps", "keep", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"imitate.{name} is {getattr(self, name)}; expected at least 1")
        for name in ("scale", "eval_episodes", "save_every", "threads", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"imitate.{name} is {getattr(self, name)}; expected a finite number, 0 or more")
        if not 0 < self.top <= 1:
            raise ValueError(f"imitate.top is {self.top}; expected a share of the steps, above 0 and at most 1")
        for name, known in (("method", ("decision", "cloning")), ("context", ("window", "episode"))):
            if getattr(self, name) not in known:
                raise ValueError(f"imitate.{name} is {getattr(self, name)!r}; expected {' or '.join(map(repr, known))}")
        if not all(math.isfinite(target) for target in self.targets):
            raise ValueError(f"imitate.targets is {list(self.targets)}; expected finite numbers")
        if self.targets and self.method == "cloning":
            raise ValueError("imitate.targets is set, and imitate.method is 'cloning', which is asked for nothing")


@dataclass(frozen=True)
class ImitationConfig:
    out: str = ""
    """run folder for events and checkpoints; empty: out/ and the name of the run file"""
    resume: bool = False
    """continue the run in that folder, if it holds one"""
    imitate: ImitateConfig = field(default_factory=ImitateConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        if self.model.kind != "lm" or self.model.stack == "reversible" or self.model.depth.kind == "exits":
            raise ValueError(
                "a Decision Transformer needs model.kind 'lm', a residual or universal stack and no exits; change the "
                "[model] section"
            )
        if self.model.position.log_scale:
            raise ValueError(
                f"model.position.log_scale is {self.model.position.log_scale}; expected 0, since episodes begin "
                "anywhere in the rows that are learned from"
            )
