"""What a backend is: a name, whether it can run here, whether it can serve a call, and the run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spanformer.ops.call import Attended, Call


@dataclass(frozen=True)
class Backend:
    name: str
    unusable: Callable[[], list[str]]
    """why it cannot run on this machine; [] if it can"""
    refuses: Callable[[Call], list[str]]
    """why it cannot serve this call; [] if it can"""
    run: Callable[[Call], Attended]


def refuse_second_derivative(name: str) -> None:
    """For a hand-written backward: under create_graph=True its result would pass for a constant, silently wrong."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"backend {name!r} has no second derivative (create_graph=True); backend='reference' has, at dense cost"
        )
