"""Which layer a token should leave at, predicted from its state.

Depth-Adaptive Transformer (Elbayad, Gu, Grave, Auli, 2019), §3.1. https://arxiv.org/abs/1910.10073

    sequence      softmax(W mean_t x_t^1), one exit for all tokens of a text seen so far
    multinomial   softmax(W x_t^1), decided after the first layer
    geometric     χ^n = σ(w · x_t^n + b), the same w for all layers; q(n) = χ^n Π_{i<n} (1 − χ^i), the rest at the last
    calm          χ^n as above, trained on whether layer n predicts the last layer's token; the trunk gets no gradient

An encoder's mean exists before the first answer token. A language model has no encoder, so `sequence` takes the mean of
the text up to each token, which does not see the future.

Shapes: L layers, B batch, T tokens, N tokens that still run, dim of hidden states.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["sequence", "multinomial", "geometric", "calm"]


class Decided(nn.Module):
    """`sequence` and `multinomial`: the first layer's state decides."""

    def __init__(self, dim: int, layers: int, *, whole: bool) -> None:
        """whole: the mean over the text so far decides."""
        super().__init__()
        self.score, self.whole = nn.Linear(dim, layers), whole

    def logits(self, first: Tensor) -> Tensor:
        """first [B, T, dim], the states after the first layer → [B, T, L]"""
        if self.whole:
            first = first.cumsum(1) / torch.arange(1, first.shape[1] + 1, device=first.device)[:, None]
        return self.score(first)

    def loss(self, states: list[Tensor], exits: Tensor) -> Tensor:
        """states: [B, T, dim] after each layer; exits [B, T] the oracle's layers → a scalar."""
        return F.cross_entropy(self.logits(states[0]).flatten(0, 1), exits.flatten())


class Geometric(nn.Module):
    """`geometric` and `calm`: each layer's state says whether to stop there."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, states: Tensor) -> Tensor:
        """states [..., dim] → the logit of χ [...]"""
        return self.score(states)[..., 0]

    def loss(self, states: list[Tensor], exits: Tensor) -> Tensor:
        """−log q(exits), see `Decided.loss`."""
        logits = torch.stack([self(x) for x in states[:-1]])  # [L − 1, B, T]
        layer = torch.arange(len(logits), device=exits.device)[:, None, None]
        stays = torch.where(layer < exits, F.logsigmoid(-logits), torch.zeros_like(logits))
        stops = torch.where(layer == exits, F.logsigmoid(logits), torch.zeros_like(logits))
        return -(stays + stops).sum(0).mean()

    def consistency_loss(self, states: list[Tensor], agrees: Tensor) -> Tensor:
        """Binary cross-entropy of each layer but the last, for states without gradient. agrees [L − 1, B, T] bool:
        whether the layer predicts the last layer's token."""
        logits = torch.stack([self(x.detach()) for x in states[:-1]])
        return F.binary_cross_entropy_with_logits(logits, agrees.to(logits.dtype))
