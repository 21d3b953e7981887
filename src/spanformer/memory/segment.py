"""Segment recurrence: each layer keeps the hidden states of earlier tokens, so that a long text can be read in pieces.

Transformer-XL (Dai et al., 2019), https://arxiv.org/abs/1901.02860

    k, v = projections of [stop_gradient(memory), x]        memory ← the last M of [memory, x]

M follows what the layer's heads can see, rounded up to blocks, so it shrinks and grows with their spans.
Shapes: B batch, M remembered tokens, T new tokens, dim of hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BLOCK = 64  # memory lengths are multiples of this: fewer shapes, and spare room for spans that grow


@dataclass(frozen=True, eq=False)
class State:
    """What a model carries from one segment to the next. Layers may remember different lengths."""

    hidden: tuple[Tensor, ...]
    """per layer [B, M, dim], detached"""
    seen: int = 0
    """tokens read so far, remembered or not"""
    documents: Tensor | None = None
    """[B, longest M] ids, if the text is packed documents"""
    padding: Tensor | None = None
    """[B, longest M] bool, True where a token is padding"""

    def rows(self, rows: slice) -> State:
        """Some rows of the batch alone."""
        return replace(
            self,
            hidden=tuple(h[rows] for h in self.hidden),
            documents=None if self.documents is None else self.documents[rows],
            padding=None if self.padding is None else self.padding[rows],
        )

    @staticmethod
    def stack(states: list[State]) -> State:
        """The rows of several states, one below the other."""
        first = states[0]
        return replace(
            first,
            hidden=tuple(torch.cat(rows) for rows in zip(*(s.hidden for s in states), strict=True)),
            documents=None if first.documents is None else torch.cat([_there(s.documents) for s in states]),
            padding=None if first.padding is None else torch.cat([_there(s.padding) for s in states]),
        )


def _there(t: Tensor | None) -> Tensor:
    if t is None:
        raise ValueError("some of the states carry documents or padding and others do not; expected all or none")
    return t


def memory_length(lookback: list[int]) -> int:
    """How many states a layer keeps for heads that look back so far: whole blocks, and one to spare, so that a span
    that grows finds its tokens there."""
    longest = max(lookback)
    return (longest // BLOCK + 2) * BLOCK if longest else 0


def remember(past: Tensor, x: Tensor, length: int) -> Tensor:
    """The last `length` of past [B, M, …] and x [B, T, …], detached."""
    new = x.shape[1]
    if length <= new:
        return x[:, new - length :].detach()
    return torch.cat([past[:, max(0, past.shape[1] - (length - new)) :], x.detach()], 1)
