"""Compression functions of the Compressive Transformer (Rae et al., 2019), https://arxiv.org/abs/1911.05507, §3.2.

    mean, max    of c tokens
    conv         a convolution with kernel and stride c
    dilated      two convolutions of kernel 3, dilated by 1 and by c, each added to its input, then conv

The paper gives no layout of its dilated convolutions; this one is ours. Convolutions start as the mean.
Shapes: B batch, T tokens of a block, n = T / c slots, dim of hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Compressor(nn.Module):
    """loss: what trains it, "attention" or "autoencode", for which it can rebuild the tokens."""

    def __init__(self, dim: int, ratio: int, how: str, loss: str) -> None:
        super().__init__()
        for name, value, known in (
            ("compress", how, ("mean", "max", "conv", "dilated")),
            ("loss", loss, ("attention", "autoencode")),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known)}")
        self.ratio, self.how, self.loss, self.learns = ratio, how, loss, how in ("conv", "dilated")
        if self.learns:
            self.weight = nn.Parameter(torch.eye(dim).repeat(1, ratio) / ratio)
            """[dim, c · dim]"""
            self.bias = nn.Parameter(torch.zeros(dim))
        if how == "dilated":
            self.mixing = nn.Parameter(torch.zeros(2, 3, dim, dim))
        if self.learns and loss == "autoencode":
            self.back = nn.Parameter(torch.eye(dim).repeat(ratio, 1))
            """[c · dim, dim]"""

    def forward(self, old: Tensor) -> Tensor:
        """[B, T, dim] → [B, n, dim]"""
        b, tokens, dim = old.shape
        if self.how == "dilated":
            for taps, step in zip(self.mixing, (1, self.ratio), strict=True):
                near = F.pad(old, (0, 0, step, step))
                mixed = sum(near[:, n * step : n * step + tokens] @ tap for n, tap in enumerate(taps))
                old = old + mixed.relu() if isinstance(mixed, Tensor) else old
        each = old.reshape(b, tokens // self.ratio, self.ratio, dim)
        if self.how == "mean":
            return each.mean(2)
        if self.how == "max":
            return each.amax(2)
        return F.linear(each.flatten(2), self.weight, self.bias)

    def rebuild(self, new: Tensor) -> Tensor:
        """[B, n, dim] → [B, T, dim]"""
        return F.linear(new, self.back).view(len(new), -1, new.shape[2])
