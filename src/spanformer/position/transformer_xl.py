"""Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context (Dai et al., 2019), §3.3.
https://arxiv.org/abs/1901.02860

    s_ij = (q_i·k_j + q_i·r[d] + u·k_j + v·r[d]) / sqrt(D)        r[d] = W R_d,  d = i − j,  R_d a sinusoid

Written with q + u for the query, this is (q + u)·k + (q + u)·r[d] + (v − u)·r[d]: an encoded query, a vector and a bias
for each distance. Each head has its own W, r, u and v. The paper has one W for each layer, and one u and v for
all layers; here, as in its code with untied biases, each layer with its own encoding has its own u and v.

Shapes: H heads, D head size, dim of hidden states, L distances.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from spanformer.kinds import PositionSpec
from spanformer.ops import Rule
from spanformer.position.absolute import sinusoids
from spanformer.position.base import Encode, Places, Position


class TransformerXL(Position):
    """R is defined for every distance, so attention may have any reach. Each call costs a product of L × dim and
    dim × dim."""

    def __init__(self, dim: int, heads: int, head_dim: int, *, causal: bool = True) -> None:
        super().__init__()
        if dim < 1 or heads < 1 or head_dim < 1:
            raise ValueError(f"dim is {dim}, heads {heads} and head_dim {head_dim}; expected at least 1 each")
        self.dim, self.heads, self.causal = dim, heads, causal
        self.weight = nn.Parameter(torch.randn(heads, head_dim, dim) * dim**-0.5)
        """[H, D, dim]: W, which projects R_d to the head size"""
        self.u, self.v = (nn.Parameter(torch.randn(heads, head_dim) * 0.02) for _ in range(2))
        """[H, D] each"""

    @classmethod
    def build(cls, spec: PositionSpec) -> TransformerXL:
        return cls(spec.dim, spec.heads, spec.head_dim, causal=spec.causal)

    def encode(self, q: Tensor, k: Tensor, view: Places) -> tuple[Tensor, Tensor]:
        return q + self.u[:, None].to(q.dtype), k

    def encode_for(self, heads: list[int]) -> Callable[[Tensor, Tensor, Places], tuple[Tensor, Tensor]]:
        u = self.u[heads]
        return lambda q, k, view: (q + u[:, None].to(q.dtype), k)

    def encode_at(self, positions: Callable[[], Tensor], dtype: torch.dtype, heads: list[int] | None = None) -> Encode:
        u = self.u if heads is None else self.u[heads]
        return lambda q, k: (q + u[:, None].to(q.dtype), k)

    def rule(self, view: Places, length: int) -> Rule:
        future = 0 if self.causal else max(length - 1, 1)
        distance = torch.arange(-future, max(length, 1 + future), device=self.weight.device)
        r = sinusoids(distance, self.dim).to(self.weight.dtype) @ self.weight.transpose(1, 2)  # [H, L, D]
        bias = (r @ (self.v - self.u)[..., None])[..., 0] / math.sqrt(r.shape[2])
        return Rule(self.heads, causal=False, max_future=future, distance_vec=r, distance_bias=bias)

    def extra_repr(self) -> str:
        both = "" if self.causal else ", causal=False"
        return f"dim={self.dim}, heads={self.heads}, head_dim={self.u.shape[1]}{both}"
