"""A short causal convolution for each channel, whose last inputs are carried from one segment to the next.

    out_t = Σ_{m < width} w_m x_{t−m}

x_{t−m} counts as 0 where it belongs to an earlier document; padding is passed over, as if it were not there.
Shapes: B batch, H heads, T tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ShortConvolution(nn.Module):
    def __init__(self, heads: int, head_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter((torch.rand(heads, head_dim, width) * 2 - 1) / width**0.5)
        """[H, D, width], the newest token's last"""

    def forward(
        self, x: Tensor, tail: Tensor, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B, H, T, D] behind tail [B, H, width − 1, D] → [B, H, T, D] in the tail's dtype, and the tail after x."""
        b, tokens, before = len(x), x.shape[2], self.width - 1
        every, order, run = torch.cat([tail, x.to(tail.dtype)], 2), None, None
        if documents is not None:
            begins = documents[:, 1:] != documents[:, :-1]
            run = torch.cat([begins.new_zeros(b, before + 1), begins], 1).cumsum(1)
        if padding is not None:  # padding goes first: real tokens are then neighbours, and the last ones are the tail
            absent = torch.cat([padding.new_zeros(b, before), padding], 1)
            order = absent.logical_not().to(torch.int8).argsort(dim=1, stable=True)
            every = every.gather(2, order[:, None, :, None].expand_as(every))
            run = None if run is None else run.gather(1, order)
        weight, out = self.weight.to(every.dtype), torch.zeros_like(every)
        for m in range(self.width):
            shifted = every[:, :, : before + tokens - m]
            if run is not None:
                shifted = shifted * (run[:, m:] == run[:, : before + tokens - m])[:, None, :, None]
            tap = weight[:, None, :, self.width - 1 - m]
            out = out + nn.functional.pad(shifted * tap, (0, 0, m, 0))
        if order is not None:
            out = torch.empty_like(out).scatter(2, order[:, None, :, None].expand_as(out), out)
        out = out[:, :, before:]
        if padding is not None:
            out = out.masked_fill(padding[:, None, :, None], 0)
        return out, next_tail(x, tail, padding, documents)


def next_tail(x: Tensor, tail: Tensor, padding: Tensor | None, documents: Tensor | None) -> Tensor:
    """The tail [B, H, width − 1, D] after x [B, H, T, D]: its last tokens, of the newest document alone."""
    tokens, before = x.shape[2], tail.shape[2]
    if padding is not None:
        absent = torch.cat([padding.new_zeros(len(x), before), padding], 1)
        order = absent.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, tokens:]
        every = torch.cat([tail, x.to(tail.dtype)], 2)
        found = every.gather(2, order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    else:
        order = torch.arange(tokens, tokens + before, device=x.device).expand(len(x), -1)
        found = torch.cat([tail[:, :, tokens:], x[:, :, max(0, tokens - before) :].to(tail.dtype)], 2)
    if documents is None:
        return found
    begins = (documents[:, 1:] != documents[:, :-1]).cumsum(1)
    run = torch.cat([begins.new_zeros(len(x), before + 1), begins], 1)  # of the tail and of x
    return found.masked_fill((run.gather(1, order) != run[:, -1:])[:, None, :, None], 0)
