"""Parts of a model that run again in the backward pass, instead of keeping their activations.

Shapes: N tokens of the whole batch, …: sizes of each token's numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spanformer.core.recompute import recompute


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), whose activations the backward pass computes again; as it is where nothing has a gradient.
    Random numbers and autocast are then as they were."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    contexts = lambda: (contextlib.nullcontext(), recompute())  # noqa: E731
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)


def by_chunks(function: Callable[..., Tensor], size: int, *rows: Tensor) -> Tensor:
    """function(*rows) of rows [N, …], `size` tokens at a time; only the inputs are kept for the backward pass. size 0,
    or no more tokens than that: at once, and everything is kept."""
    if not size or len(rows[0]) <= size:
        return function(*rows)
    pieces = zip(*(t.split(size) for t in rows), strict=True)
    return torch.cat([recomputed(function, *piece) for piece in pieces])


class Moment:
    """The random state and autocast of a forward pass, so that it can run again."""

    def __init__(self, device: torch.device, before: Moment | None = None) -> None:
        """before: an earlier one, whose random state serves this one too where no number was drawn since."""
        self.device, kind = device, device.type
        self.random = torch.get_rng_state()
        if before is not None and torch.equal(self.random, before.random):
            self.random = before.random
        self.device_random = None if kind == "cpu" else torch.get_device_module(kind).get_rng_state(device)
        self.autocast: dict[str, Any] | None = None
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            self.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}

    def cast(self) -> contextlib.AbstractContextManager[object]:
        """Autocast as it was, without its cache of weights: those of a pass without gradients have none, and would
        serve a later pass that needs them."""
        return (
            contextlib.nullcontext() if self.autocast is None else torch.autocast(**self.autocast, cache_enabled=False)
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around a second pass with the random numbers and the autocast of the first, with gradients."""
        other = [] if self.device_random is None else [self.device]
        with torch.random.fork_rng(other, device_type=self.device.type if other else "cuda"):
            torch.set_rng_state(self.random)
            if self.device_random is not None:
                torch.get_device_module(self.device.type).set_rng_state(self.device_random, self.device)
            with self.cast(), recompute(), torch.enable_grad():
                yield
