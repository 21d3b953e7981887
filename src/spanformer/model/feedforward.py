"""The feed-forward part of a layer, applied to each token separately.

relu, gelu:  y = down(drop(f(up(x))))                 Attention Is All You Need, https://arxiv.org/abs/1706.03762
swiglu:      y = down(drop(silu(gate(x)) · up(x)))    GLU Variants, https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spanformer.model.linear import Linear, product, through_relu
from spanformer.model.recompute import Moment

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
        if not 0 < self.chunk < x.shape[:-1].numel():
            return self._feed(x), None
        return _Chunked.apply(self, x.flatten(0, -2), *self.parameters()).view(x.shape), None

    def _feed(self, x: Tensor) -> Tensor:
        if self.kind == "relu" and not (self.training and self.dropout.p):
            return through_relu(x, self.up, self.down)
        return self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        """x [..., dim] → what `down` multiplies, [..., hidden]"""
        if self.gate is not None:
            return self.dropout(F.silu(self.gate(x)) * self.up(x))
        return self.dropout(self.up.relu(x) if self.kind == "relu" else F.gelu(self.up(x)))


class _Chunked(torch.autograd.Function):
    """A feed-forward of x [N, dim], `chunk` tokens at a time. The backward pass computes `inner` of a chunk again, but
    not the product after it, whose gradients need no output."""

    @staticmethod
    def forward(ctx: Any, feed: FeedForward, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.feed, ctx.moment = feed, Moment(x.device)
        ctx.save_for_backward(x, *parameters)
        return torch.cat([feed.down(feed.inner(piece)) for piece in x.split(feed.chunk)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor):
        x, *_ = ctx.saved_tensors
        feed: FeedForward = ctx.feed
        g_x = torch.empty_like(x) if ctx.needs_input_grad[1] else None
        sums: dict[Tensor, Tensor] = {}
        with ctx.moment.again():
            for piece, g, to in zip(*(_split(t, len(x), feed.chunk) for t in (x, grad, g_x)), strict=True):
                for p, more in _gradients(feed, piece, g, to):
                    sums[p] = sums[p].add_(more) if p in sums else more.to(p.dtype)
        return None, g_x, *(sums.get(p) for p in feed.parameters())


def _split(t: Tensor | None, rows: int, size: int) -> Sequence[Tensor | None]:
    return [None] * -(-rows // size) if t is None else t.split(size)


def _gradients(feed: FeedForward, x: Tensor, g: Tensor, to: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradients of parameters by a chunk x [n, dim], where g is that of its output; that of x goes into `to`."""
    x = x.detach().requires_grad_(to is not None)
    inner, down = feed.inner(x), feed.down
    with torch.no_grad():
        if down.weight.requires_grad:
            yield down.weight, g.t() @ inner.to(g.dtype)
        if down.bias is not None and down.bias.requires_grad:
            yield down.bias, g.sum(0)
        g_inner = product(g, down.weight.t()).to(inner.dtype)
    before = [p for m in (feed.up, feed.gate) if m is not None for p in m.parameters() if p.requires_grad]
    if inner.requires_grad:
        found = torch.autograd.grad(inner, [*before, *([] if to is None else [x])], g_inner)
        yield from zip(before, found, strict=False)
        if to is not None:
            to.copy_(found[-1])
