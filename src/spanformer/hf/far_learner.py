"""Linear states in a fit: which heads get one, and how their features learn.

1. Every head that the survey cuts gets a state; its features learn by attention transfer (transfer.py).
2. A state stays where it pays. The survey knows what a head's window costs, and the transfer which share of the error
   the state leaves, so a state saves cost·(1 − share); at the price λ of a token it costs λ times its bytes in tokens.
3. Windows are allocated again: a head with a state then has its cost times that share.
4. In `learn` the features follow the gradient of the same loss as the windows.

Shapes: L layers, Hkv key/value heads, G windows tried.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.far import far_of
from spanformer.hf.spans import HeadSpans, head_spans
from spanformer.hf.survey import Survey
from spanformer.hf.text import TextChunks
from spanformer.hf.transfer import TransferConfig, errors_left, transfer
from spanformer.model.budget import Budget, allocate


class FarLearner:
    """Adam on the features of all layers, beside the windows'. Does nothing if no head has a state."""

    def __init__(self, layers: list[HeadSpans], lr: float) -> None:
        self.lr = lr
        self.maps = [far for far in map(far_of, layers) if far is not None]
        self.parameters = [p for far in self.maps for p in far.parameters()]
        for p in self.parameters:
            p.requires_grad_(True)
        self.adam = torch.optim.Adam(self.parameters, lr=lr, betas=(0.8, 0.95)) if self.parameters else None
        self.keep()

    def step(self, share: float) -> None:
        """One step with this share of the learning rate."""
        if self.adam is None:
            return
        for group in self.adam.param_groups:
            group["lr"] = self.lr * share
        self.adam.step()
        self.adam.zero_grad()

    def keep(self) -> None:
        """Remember the features as they are."""
        self.best = [copy.deepcopy(far.state_dict()) for far in self.maps]

    def restore(self) -> None:
        """Return to the features that were kept last."""
        for far, best in zip(self.maps, self.best, strict=True):
            far.load_state_dict(best)
        for p in self.parameters:
            p.requires_grad_(False)
            p.grad = None


def states_in_tokens(layers: list[HeadSpans], dtype: torch.dtype) -> float:
    """Bytes of all states as tokens of a KV cache of this dtype, per key/value head."""
    heads = sum(layer.groups for layer in layers)
    held = sum(layer.far.state_bytes(dtype) for layer in layers if layer.far is not None)
    return held / (layers[0].head_size * dtype.itemsize * heads)


def start_states(
    model: PreTrainedModel, texts: TextChunks, trials: TextChunks, budget: Budget, found: Survey,
    config: TransferConfig, dtype: torch.dtype, on_progress: OnCount | None = None,
) -> tuple[Budget, Survey]:  # fmt: skip
    """Teach states to the heads, keep those that pay, and return the budget less their bytes and the survey with what
    heads cost beside their states."""
    from spanformer.hf.fit import set_windows  # which learns with them

    layers = list(head_spans(model).values())
    turn_on(layers, allocate(found.costs, found.grid, budget)[0] < budget.longest - 1)
    first = replace(budget, states=states_in_tokens(layers, dtype))
    windows, price = allocate(found.costs, found.grid, first)
    set_windows(model, first.whole(windows))
    transfer(model, texts, config, on_progress)
    left = errors_left(model, trials)
    taken = torch.tensor([0.0 if s.far is None else _one_state(s, dtype) for s in layers])[:, None]
    saved = costs_at(found, windows) * (1 - left)
    turn_on(layers, saved > (price if math.isfinite(price) else 0.0) * taken)
    on = torch.stack([torch.zeros(s.groups, dtype=torch.bool) if s.far is None else s.far.on for s in layers])
    share = torch.where(on, left.clamp(max=1), 1.0)
    return replace(budget, states=states_in_tokens(layers, dtype)), replace(found, costs=found.costs * share[..., None])


def turn_on(layers: list[HeadSpans], on: Tensor) -> None:
    """Give states to the heads of on [L, Hkv] among those that have one now."""
    for layer, row in zip(layers, on, strict=True):
        if layer.far is not None:
            layer.far.on.logical_and_(row.to(layer.far.on.device))


@contextmanager
def states_off(layers: list[HeadSpans]) -> Iterator[None]:
    """Without states for a while, to measure windows alone."""
    before = [None if layer.far is None else layer.far.on.clone() for layer in layers]
    turn_on(layers, torch.zeros(len(layers), layers[0].groups, dtype=torch.bool))
    try:
        yield
    finally:
        for layer, on in zip(layers, before, strict=True):
            if layer.far is not None and on is not None:
                layer.far.on.copy_(on)


def costs_at(found: Survey, windows: Tensor) -> Tensor:
    """[L, Hkv] what the survey says that these windows cost."""
    curves, grid = found.costs.flatten(0, 1).double().numpy(), found.grid
    each = [np.interp(w, grid, curve) for w, curve in zip(windows.flatten().tolist(), curves, strict=True)]
    return torch.tensor(each, dtype=torch.float32).view(windows.shape)


def _one_state(layer: HeadSpans, dtype: torch.dtype) -> float:
    """The bytes of one head's state, in tokens."""
    far = layer.far
    assert far is not None
    wide = torch.promote_types(dtype, torch.float32)
    return far.features * (far.value_size + 1) * wide.itemsize / (layer.head_size * dtype.itemsize)
