"""The rows of events.jsonl in a run of reinforcement learning, beside those of every run (events.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from spanformer.core.events import FORMAT, Event


@dataclass(frozen=True)
class PolicyStartEvent(Event):
    """A run of reinforcement learning begins. The first row of its file."""

    kind = "policy"
    run: str
    config: dict
    parameters: int
    env: str
    rows: int
    """environments side by side"""
    machine: dict
    version: str
    format: int = FORMAT


@dataclass(frozen=True)
class UpdateEvent(Event):
    """One update of a policy; `step` counts updates. Returns are those of the episodes that ended in its window."""

    kind = "update"
    seconds: float
    """seconds of updates since the start of the run"""
    env_steps: int
    """steps of all environments since the start of the run"""
    episodes: int
    """that ended in this window"""
    policy_loss: float
    value_loss: float
    entropy: float
    """of actions, in nats"""
    kl: float
    grad_norm: float
    lr: float
    steps_per_second: float
    episode_return: float = math.nan
    success: float = math.nan
    """share of those episodes that ended well, if the environment says so"""
    length: float = math.nan
    """mean steps of those episodes"""
    span_average: float = math.nan
    spans: list = field(default_factory=list)
    """[layers][heads] learned spans in steps; None for a head that learns none; empty without attention"""


@dataclass(frozen=True)
class PlayEvent(Event):
    """Whole episodes with the most probable actions."""

    kind = "play"
    env: str
    episodes: int
    episode_return: float
    length: float
    success: float = math.nan


@dataclass(frozen=True)
class ImitationStartEvent(Event):
    """A run that learns from recorded episodes begins. The first row of its file."""

    kind = "imitation"
    run: str
    config: dict
    parameters: int
    env: str
    episodes: int
    data_steps: int
    """steps of all episodes"""
    returns: list[float]
    """smallest, mean and largest return of the data"""
    machine: dict
    version: str
    format: int = FORMAT


@dataclass(frozen=True)
class ImitateEvent(Event):
    """Optimiser steps since the previous row; losses are means over them."""

    kind = "imitate"
    seconds: float
    """seconds of steps since the start of the run"""
    loss: float
    """nats of an action, or squared error"""
    penalty: float
    grad_norm: float
    lr: float
    span_average: float = math.nan
    """in tokens"""
    spans: list = field(default_factory=list)
    """[layers][heads] learned spans in tokens; None for a head that learns none"""


@dataclass(frozen=True)
class AskedEvent(Event):
    """Whole episodes in which a return was asked for."""

    kind = "asked"
    env: str
    target: float
    """NaN: nothing is asked for"""
    episodes: int
    episode_return: float
    """the mean of what was got"""
    deviation: float
    """standard deviation over episodes"""
    length: float
    success: float = math.nan
