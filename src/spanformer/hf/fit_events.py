"""What `fit-spans` reports while it works, one class for each kind of event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spanformer.core.events import NoteEvent, ProgressEvent


@dataclass(frozen=True)
class WindowStep:
    """One step that moves the windows."""

    step: int
    kl: float
    """nats from the full model, with soft windows"""
    price: float
    """of one token of window"""
    ramp: float
    lr: float
    grad_norm: float
    seconds: float
    windows: list[list[float]]
    """[layers][KV heads] tokens"""


@dataclass(frozen=True)
class Trial:
    """Whole windows, tried on texts kept aside."""

    step: int
    kl: float
    """nats from the full model"""


@dataclass(frozen=True)
class LoraStep:
    """One step that moves LoRA's weights."""

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
    """For callers that did not ask."""
