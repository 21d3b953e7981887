"""The events that `fit-spans` reports, one class per kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spanformer.core.events import NoteEvent, ProgressEvent


@dataclass(frozen=True)
class WindowStep:
    """One training step of the windows."""

    step: int
    kl: float
    """nats from the full model, with soft windows"""
    price: float
    """the price of one token of window"""
    ramp: float
    lr: float
    grad_norm: float
    seconds: float
    windows: list[list[float]]
    """[layers][KV heads] tokens"""


@dataclass(frozen=True)
class Trial:
    """An evaluation of whole windows on validation texts."""

    step: int
    kl: float
    """nats from the full model"""


@dataclass(frozen=True)
class LoraStep:
    """One training step of LoRA's weights."""

    step: int
    kl: float


@dataclass(frozen=True)
class Measured:
    """The loss on held-out text."""

    bits: float
    """per byte"""
    loss: float
    """nats per token"""
    tokens: int


OnFitEvent = Callable[[WindowStep | Trial | LoraStep | Measured | NoteEvent | ProgressEvent], object]


def ignore(_event: object) -> None:
    """Ignore events."""
