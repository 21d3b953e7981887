"""Whether a part of a model is running a second time, in the backward pass.

Checkpointing, the reversible stack and chunked parts keep few activations and run parts of a model again for the
others. A mechanism with state that training updates, such as centroids or running means, must not update it again:

    if self.training and not recomputing():
        self.centroids.lerp_(…)

The first pass of a reversible stack runs without a graph, as evaluation does; `to_be_recomputed` tells the two apart.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Thread(threading.local):
    """PyTorch runs the backward pass of a GPU in a thread of its own."""

    depth = 0
    ahead = 0


_thread = _Thread()


def recomputing() -> bool:
    """Whether this forward pass repeats an earlier one, for its activations alone."""
    return _thread.depth > 0


@contextlib.contextmanager
def recompute() -> Iterator[None]:
    """Around a forward pass that repeats an earlier one."""
    _thread.depth += 1
    try:
        yield
    finally:
        _thread.depth -= 1


def to_be_recomputed() -> bool:
    """Whether this forward pass runs without a graph because the backward pass is going to repeat it."""
    return _thread.ahead > 0


@contextlib.contextmanager
def before_recompute() -> Iterator[None]:
    """Around a forward pass without a graph that the backward pass is going to repeat."""
    _thread.ahead += 1
    try:
        yield
    finally:
        _thread.ahead -= 1
