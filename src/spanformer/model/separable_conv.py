"""A feed-forward that reads a token's neighbours: a depthwise convolution over tokens before the two products.

Universal Transformers (Dehghani et al., 2018), §2.1, whose transition may be a separable convolution.
https://arxiv.org/abs/1807.03819
Xception: Deep Learning with Depthwise Separable Convolutions (Chollet, 2016), https://arxiv.org/abs/1610.02357

    c_t = Σ_j w_j ⊙ x_(t−j)      y_t = down(relu(up(c_t)))

with j = 0 … K − 1 in a model that never sees the future, j = −(K−1)/2 … (K−1)/2 in an encoder. w has one number for
each tap and component (depthwise); `up` mixes the components (pointwise). tensor2tensor has K = 3 and convolves the
inner activations a second time, over 5 tokens; here the second product is of each token alone, so that a token that
halted costs nothing.

Shapes: B batch, T tokens, N tokens that still run, K taps, dim of hidden states.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from spanformer.memory import LayerMemory, MemoryShape
from spanformer.memory.inputs import Inputs, beside, inputs_of
from spanformer.model.feedforward import FeedForward


class SeparableConv(nn.Module):
    """Its memory, the last K − 1 inputs, is a part of the layer's memory."""

    def __init__(
        self, dim: int, hidden: int, kernel: int, *, causal: bool, bias: bool, dropout: float, chunk: int = 0
    ) -> None:  # fmt: skip
        super().__init__()
        if kernel < 1 or (not causal and kernel % 2 == 0):
            raise ValueError(f"kernel is {kernel}; expected 1 or more, and in an encoder an odd number")
        self.dim, self.kernel, self.causal = dim, kernel, causal
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel).uniform_(-1, 1) / math.sqrt(kernel))
        """[dim, 1, K]: w, as in nn.Conv1d; the last tap is the newest token"""
        self.feed = FeedForward(dim, hidden, kind="relu", bias=bias, dropout=dropout, chunk=chunk)

    @property
    def weights_per_token(self) -> int:
        """The number of weights used per token."""
        return self.weight.numel() + self.feed.weights_per_token

    def offsets(self) -> range:
        """How far back each tap is, the last first."""
        ahead = 0 if self.causal else self.kernel // 2
        return range(self.kernel - 1 - ahead, -ahead - 1, -1)

    def forward(self, x: Tensor, memory: LayerMemory, view: Any) -> tuple[Tensor, None]:
        """x [B, T, dim] → y [B, T, dim], or [N, dim] of the view's active tokens. memory: the layer's."""
        taps = inputs_of(memory).extend(x, view).taps(self.offsets(), view.active)
        weights = self.weight[:, 0].unbind(1)
        convolved = sum((w * tap for w, tap in zip(weights, taps, strict=True)), torch.zeros_like(taps[0]))
        y, _ = self.feed(convolved)
        return y if view.active is not None else y.view(x.shape), None

    def with_memory(self, memory: LayerMemory, mechanism: nn.Module, shape: MemoryShape) -> LayerMemory:
        """The empty memory of a layer with this feed-forward. memory: that of its attention."""
        return beside(memory, mechanism, Inputs.start(self.kernel - 1 if self.causal else 0, self.dim, shape))

    def extra_repr(self) -> str:
        return f"kernel={self.kernel}, causal={self.causal}"
