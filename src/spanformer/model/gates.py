"""Gates in the place of a block's sums: Gated Transformer-XL.

Stabilizing Transformers for Reinforcement Learning (Parisotto et al., 2019), §3.2. https://arxiv.org/abs/1910.06764

x: the stream, y: the output of attention or feed-forward after a ReLU, without which two linear maps would meet.

    gru       r = σ(W_r y + U_r x)    z = σ(W_z y + U_z x − b)    h = tanh(W_g y + U_g (r ⊙ x))    (1 − z) ⊙ x + z ⊙ h
    input     σ(W x) ⊙ x + y
    output    x + σ(W x − b) ⊙ y
    highway   σ(W x + b) ⊙ x + (1 − σ(W x + b)) ⊙ y
    sigtanh   x + σ(W y − b) ⊙ tanh(U y)

The bias b starts at 2 for gru and at 1 for the others, so that a new block nearly passes x on. Norms
stand before attention and feed-forward only.

Shapes: x and y [..., dim].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.model.linear import Linear

FIRST_BIAS = {"gru": 2.0, "input": 0.0, "output": 1.0, "highway": 1.0, "sigtanh": 1.0}


class GRUGate(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.from_y = Linear(dim, 3 * dim, bias=False)
        """W_r, W_z and W_g"""
        self.from_x = Linear(dim, 2 * dim, bias=False)
        """U_r and U_z"""
        self.reset = Linear(dim, dim, bias=False)
        """U_g"""
        self.bias = nn.Parameter(torch.full((dim,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        r_y, z_y, h_y = self.from_y(y).chunk(3, -1)
        r_x, z_x = self.from_x(x).chunk(2, -1)
        z = (z_y + z_x - self.bias).sigmoid()
        h = (h_y + self.reset((r_y + r_x).sigmoid() * x)).tanh()
        return (1 - z) * x + z * h


class InputGate(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.weight = Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.weight(x).sigmoid() * x + y


class OutputGate(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.weight = Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (self.weight(x) - self.bias).sigmoid() * y


class HighwayGate(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.weight = Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        g = (self.weight(x) + self.bias).sigmoid()
        return g * x + (1 - g) * y


class SigTanhGate(nn.Module):
    def __init__(self, dim: int, bias: float) -> None:
        super().__init__()
        self.weight = Linear(dim, 2 * dim, bias=False)
        """W and U"""
        self.bias = nn.Parameter(torch.full((dim,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        g, u = self.weight(y).chunk(2, -1)
        return x + (g - self.bias).sigmoid() * u.tanh()


GATES = {
    "gru": GRUGate,
    "input": InputGate,
    "output": OutputGate,
    "highway": HighwayGate,
    "sigtanh": SigTanhGate,
}


def make_gate(kind: str, dim: int) -> nn.Module:
    return GATES[kind](dim, FIRST_BIAS[kind])
