"""The protocol between a stack of layers and what decides how many of them a token runs through.

A token that stops keeps its state. Later layers skip its queries, output and feed-forward; they still project its
state to keys and values, which the tokens that go on may attend to.

Shapes: B batch, T tokens, N tokens that still run, dim of hidden states.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class DepthRun(Protocol):
    """One pass of a batch of tokens through a stack."""

    def active(self) -> Tensor | None:
        """[N] the tokens that the next layer computes, as indices into B · T; None: all."""
        ...

    def after(self, layer: int, before: Tensor, x: Tensor) -> Tensor:
        """The states [B, T, dim] after a layer, counted from 0, which turned `before` into x for the active tokens."""
        ...

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The stack's output [B, T, dim], and a term of the loss. x: the states after the last layer."""
        ...


def all_tokens(x: Tensor, padding: Tensor | None) -> Tensor:
    """[N] the indices of the tokens x [B, T, dim] that are not padding. padding [B, ≥ T] bool, aligned at the end."""
    n = x.shape[0] * x.shape[1]
    if padding is None:
        return torch.arange(n, device=x.device)
    return (~padding[:, padding.shape[1] - x.shape[1] :]).flatten().nonzero()[:, 0]


def replace_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, dim] with the rows [N, dim] at index [N], in B · T."""
    return x.flatten(0, 1).index_copy(0, index, rows.to(x.dtype)).view(x.shape)
