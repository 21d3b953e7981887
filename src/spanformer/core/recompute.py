"""Tells a module whether its forward pass is a recomputation in the backward pass.

Checkpointing, the reversible stack and chunked parts store few activations and recompute the others. A mechanism with
state that training updates, such as centroids or running means, must not update it a second time:

    if self.training and not recomputing():
        self.centroids.lerp_(…)

The first pass of a reversible stack runs without a graph, like evaluation; `to_be_recomputed` distinguishes the two.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    """One per thread: PyTorch runs the backward pass of a GPU in a separate thread."""

    depth = 0
    to_recompute = 0


_thread = _Thread()


def recomputing() -> bool:
    """Whether this forward pass recomputes the activations of an earlier one."""
    return _thread.depth > 0


@contextlib.contextmanager
def recompute() -> Iterator[None]:
    """Wrap a forward pass that recomputes an earlier one."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def to_be_recomputed() -> bool:
    """Whether this forward pass runs without a graph because the backward pass will recompute it."""
    return _thread.to_recompute > 0


@contextlib.contextmanager
def before_recompute() -> Iterator[None]:
    """Wrap a forward pass without a graph that the backward pass will recompute."""
    _thread.to_recompute += 1
    try:
        yield
    finally:
        _thread.to_recompute -= 1
