"""How sure a token is after a layer, and whether that is enough to leave the stack there.

Confident Adaptive Language Modeling (Schuster et al., 2022), §3.4. https://arxiv.org/abs/2207.07061

    softmax      c = largest − second largest probability of the next token; costs an output layer at each exit
    saturation   c = cos(x^n, x^(n−1)); no exit before layer 2
    classifier   c = σ(w · x^n + b), trained to tell whether layer n already predicts the last layer's token
    exit after layer n if c ≥ λ_t,    λ_t = clip(0.9 λ + 0.1 e^(−τ t / length), 0, 1) for the t-th generated token

A threshold of infinity means never: in float32 a difference of probabilities can be exactly 1.

Shapes: N tokens that still run, dim of hidden states, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor

Measure = Literal["softmax", "saturation", "classifier"]
Predict = Callable[[Tensor], Tensor]
"""states [N, dim] → logits [N, V]"""


@dataclass(frozen=True)
class Confidence:
    """When a token leaves the stack."""

    measure: Measure
    threshold: float = math.inf
    decay: float = 0.0
    """τ of the decaying threshold; 0: it stays"""
    length: int = 0
    """the most tokens a generated text has, for the decay"""

    def __post_init__(self) -> None:
        if self.measure not in get_args(Measure):
            raise ValueError(f"measure is {self.measure!r}; expected one of {', '.join(get_args(Measure))}")
        if not (0 <= self.threshold <= 1 or self.threshold == math.inf):
            raise ValueError(f"threshold is {self.threshold}; expected 0 … 1, or infinity for no exits")
        if self.decay < 0 or (self.decay and self.length < 1):
            raise ValueError(
                f"decay is {self.decay} with a length of {self.length}; expected at least 0, and the most tokens that "
                "a generated text has"
            )

    def at(self, token: int) -> float:
        """λ_t of the t-th generated token, counted from 0."""
        if not self.decay or math.isinf(self.threshold):
            return self.threshold
        return min(1.0, max(0.0, 0.9 * self.threshold + 0.1 * math.exp(-self.decay * token / self.length)))


def softmax_response(logits: Tensor) -> Tensor:
    """logits [N, V] → [N]"""
    top = logits.float().softmax(-1).topk(2, -1).values
    return top[:, 0] - top[:, 1]


def saturation(x: Tensor, before: Tensor) -> Tensor:
    """States of this layer and the one before, [N, dim] each → [N]"""
    return F.cosine_similarity(x.float(), before.float(), -1)
