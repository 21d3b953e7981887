"""The feed-forward part of a layer, applied to each token separately.

relu, gelu:  y = down(drop(f(up(x))))                 Attention Is All You Need, https://arxiv.org/abs/1706.03762
swiglu:      y = down(drop(silu(gate(x)) · up(x)))    GLU Variants, https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.model.linear import Linear, through_relu
from spanformer.model.recompute import by_chunks

Kind = Literal["relu", "gelu", "swiglu"]


class FeedForward(nn.Module):
    """One hidden layer; `swiglu` has a third matrix, `gate`.

    `gate` and `up` are two matrices: one joint matrix was measured on a CPU and was no faster.
    """

    def __init__(self, dim: int, hidden: int, *, kind: Kind, bias: bool, dropout: float, chunk: int = 0) -> None:
        """chunk: see `FeedForwardConfig.chunk`."""
        super().__init__()
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(get_args(Kind))}")
        if dim < 1 or hidden < 1:
            raise ValueError(f"dim is {dim} and hidden {hidden}; expected at least 1 each")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout is {dropout}; expected a share of the inner activations, 0 … 1 without 1")
        if chunk < 0:
            raise ValueError(f"chunk is {chunk}; expected a number of tokens, or 0 for all at once")
        self.kind: Kind = kind
        self.chunk = chunk
        self.up = Linear(dim, hidden, bias=bias)
        self.gate = Linear(dim, hidden, bias=bias) if kind == "swiglu" else None
        self.down = Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    @property
    def weights_per_token(self) -> int:
        """The number of weights used per token."""
        return sum(m.weight.numel() for m in (self.up, self.gate, self.down) if m is not None)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., dim] → (y [..., dim], None): no loss term, unlike `Experts`."""
        if not self.chunk:
            return self._feed(x), None
        return by_chunks(self._feed, self.chunk, x.flatten(0, -2)).view(x.shape), None

    def _feed(self, x: Tensor) -> Tensor:
        if self.kind == "relu" and not (self.training and self.dropout.p):
            return through_relu(x, self.up, self.down)
        if self.gate is not None:
            inner = F.silu(self.gate(x)) * self.up(x)
        else:
            inner = self.up.relu(x) if self.kind == "relu" else F.gelu(self.up(x))
        return self.down(self.dropout(inner))
