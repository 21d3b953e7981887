"""The protocol between a stack of layers and what decides how many of them a token runs through.

A token that stops keeps its state. Later layers skip its queries, output and feed-forward; they still project its
state to keys and values, which the tokens that go on may attend to.

Shapes: B batch, T tokens, N tokens that still run, dim of hidden states.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn


class Depth(nn.Module):
    """Decides how many layers each token runs through, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.latest: Tensor | None = None
        """[B, T] int64, the layers of each token of the last pass; 0 for padding"""
        self.count_from_here()

    def note(self, taken: Tensor) -> None:
        """Take the layers of each token of a pass, [B, T]."""
        self.latest = taken
        if not self.training:
            self.run_layers = self.run_layers + taken.sum()
            self.run_tokens = self.run_tokens + (taken > 0).sum()

    def count_from_here(self) -> None:
        """Count the layers and tokens of evaluation from 0."""
        self.run_layers: Tensor | int = 0
        self.run_tokens: Tensor | int = 0

    def counted(self) -> tuple[int, int]:
        """The layers of all tokens in evaluation since `count_from_here`, and the tokens."""
        return int(self.run_layers), int(self.run_tokens)

    def mean_run(self) -> float:
        """The mean number of layers of a token since `count_from_here`; NaN if there was none."""
        layers, tokens = self.counted()
        return layers / tokens if tokens else math.nan

    def mean_steps(self) -> float | None:
        """The mean number of layers of the last pass, without padding; None before the first."""
        if self.latest is None:
            return None
        taken = self.latest[self.latest > 0]
        return float(taken.double().mean()) if len(taken) else 0.0


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
