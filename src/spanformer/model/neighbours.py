"""SPALM: a gate mixes the tokens that followed retrieved contexts into a language model's last hidden state.

Adaptive Semiparametric Language Models, https://arxiv.org/abs/2102.02557

    m_t = Σ_i softmax_i(y_i·h_t) y_i        y_i: embedding of the token that followed neighbour i, trained and tied
    g_t = σ(w_g·h_t + b_g)                  one number a token; g → 1 means no memory
    z_t = (1 − g_t) m_t + g_t h_t           p = softmax(W z_t)

Distances of neighbours are not used. b_g starts where g is 0.9. `spanformer.retrieve.spalm` finds the neighbours.

Shapes: B batch, T tokens, k neighbours.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from spanformer.memory import Cache, State

NONE = -1
"""in the place of a token where fewer than k neighbours were found"""
START = 0.9
"""the gate's first value"""


class Finder(Protocol):
    """Finds the neighbours of tokens that a model reads, by the keys of a frozen model that reads them, too."""

    def read(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        """x [B, T] ids after those of the frozen model's state → tokens [B, T, k], and the next state."""
        ...

    def cache(self, batch: int, slack: int) -> Cache:
        """An empty KV cache of the frozen model."""
        ...

    def decode(self, x: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        """The same for x [B, T] after those of the KV cache; lengths as in `LM.decode`."""
        ...

    def receptive_field(self) -> int:
        """How many of the last tokens can affect what is found."""
        ...


class NeighbourGate(nn.Linear):
    """w_g and b_g."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1)
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(START / (1 - START)))

    def mix(self, h: Tensor, neighbours: Tensor, embedding: nn.Module) -> Tensor:
        """h [B, T, dim], neighbours [B, T, k] ids or −1 → z [B, T, dim]; h itself where there is no neighbour."""
        if neighbours.shape[:2] != h.shape[:2] or neighbours.ndim != 3:
            raise ValueError(
                f"neighbours has shape {list(neighbours.shape)}; expected [{h.shape[0]}, {h.shape[1]}, k], tokens or "
                "−1 for each of x"
            )
        there = neighbours >= 0
        y = embedding(neighbours.clamp_min(0).flatten(1)).view(*neighbours.shape, -1)
        scores = (y @ h[..., None])[..., 0].masked_fill(~there, -torch.inf)
        some = there.any(-1, keepdim=True)
        weight = scores.masked_fill(~some, 0.0).softmax(-1) * there
        m = (weight[..., None] * y).sum(-2)
        g = torch.sigmoid(self(h))
        return torch.where(some, (1 - g) * m + g * h, h)
