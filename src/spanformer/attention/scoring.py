"""Score functions of a query and a key other than the scaled dot product.

    Dot         q·k                  Luong, Pham, Manning, 2015: multiplicative, "dot"
                                     https://arxiv.org/abs/1508.04025
    General     q·W·k                Luong, Pham, Manning, 2015: multiplicative, "general"
                                     https://arxiv.org/abs/1508.04025
    Bilinear    (q·W + w)·k          Dozat, Manning, 2017: biaffine, without the terms that cancel in the softmax
                                     https://arxiv.org/abs/1611.01734
    Additive    v·tanh(W·q + U·k)    Bahdanau, Cho, Bengio, 2015
                                     https://arxiv.org/abs/1409.0473

Scaled dot-product, q·k / √D (Vaswani et al., 2017), is the default of every mechanism. All heads share the weights:
heads differ by their projections. The first three map the queries and leave the rest to `attend`, so they work with
every rule, position, backend and KV cache; distance_vec is multiplied with the mapped queries. Additive scores are not
dot products: they are computed by chunks, at the cost of all pairs that a chunk reaches times the inner size. They work
with every rule but distance_vec and distance_scale, but neither with rotary positions, which need dot products, nor
with a KV cache.

Shapes: B batch, H heads, T queries, Tk keys, D head size, A inner size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View, rotates
from spanformer.attention.chunked import Chunked, Content
from spanformer.attention.full import build as build_full
from spanformer.attention.wrapper import Wrapper
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended


class Dot(Wrapper):
    @classmethod
    def wrap(cls, inner: Attention, head_dim: int) -> Dot:
        return cls(inner)

    @classmethod
    def build(cls, spec: HeadSpec) -> Dot:
        return cls(build_full(spec))

    def map_queries(self, q: Tensor) -> Tensor:
        return self.inner.map_queries(q) * math.sqrt(q.shape[3])  # attend divides by √D


class General(Wrapper):
    """W [D, D] starts as the identity, that is, as the dot product."""

    def __init__(self, inner: Attention, head_dim: int) -> None:
        super().__init__(inner)
        self.weight = nn.Parameter(torch.eye(head_dim))

    @classmethod
    def wrap(cls, inner: Attention, head_dim: int) -> General:
        return cls(inner, head_dim)

    @classmethod
    def build(cls, spec: HeadSpec) -> General:
        return cls(build_full(spec), spec.head_dim)

    def map_queries(self, q: Tensor) -> Tensor:
        _check_size(q, self.weight)
        return self.inner.map_queries(q) @ self.weight.to(q.dtype) * math.sqrt(q.shape[3])


class Bilinear(General):
    """w [D] starts at 0."""

    def __init__(self, inner: Attention, head_dim: int) -> None:
        super().__init__(inner, head_dim)
        self.bias = nn.Parameter(torch.zeros(head_dim))

    def map_queries(self, q: Tensor) -> Tensor:
        return super().map_queries(q) + self.bias.to(q.dtype) * math.sqrt(q.shape[3])


class Additive(Chunked):
    """Stores at most queries · keys · A numbers per batch row and head."""

    def __init__(
        self, inner: Attention, head_dim: int, inner_dim: int = 0, *, queries: int = 64, keys: int = 256
    ) -> None:  # fmt: skip
        super().__init__(inner, queries=queries, keys=keys)
        size = inner_dim or head_dim
        self.query, self.key = (nn.Parameter(torch.randn(head_dim, size) / head_dim**0.5) for _ in range(2))
        """[D, A] each: W and U"""
        self.vector = nn.Parameter(torch.randn(size) / size**0.5)
        """[A]: v"""

    @classmethod
    def wrap(cls, inner: Attention, head_dim: int) -> Additive:
        return cls(inner, head_dim)

    @classmethod
    def build(cls, spec: HeadSpec) -> Additive:
        return cls(build_full(spec), spec.head_dim)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = super().supports(position=position, cache=cache, mixed=mixed, persistent=persistent)
        if rotates(position):
            reasons.append(
                f"Additive is incompatible with {type(position).__name__} positions: its scores are not dot products; "
                "use other positions (docs/compatibility.md) or none"
            )
        return reasons

    def content(self) -> tuple[Content, float | None]:
        def scores(q: Tensor, k: Tensor) -> Tensor:
            w, u, v = (t.to(q.dtype) for t in (self.query, self.key, self.vector))
            inner = ((q @ w)[:, :, :, None] + (k @ u)[:, :, None]).tanh()
            # a matrix of one column: PyTorch's FLOP counter ignores products with vectors
            return (inner @ v[:, None]).squeeze(-1)

        return scores, 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        _check_size(q, self.query)
        for name in ("distance_vec", "distance_scale"):
            if any(getattr(leaf, name) is not None for leaf in rule.leaves()):
                raise ValueError(
                    f"{name} changes the dot product of query and key, which additive scores do not have; use a "
                    "distance_bias, or another scoring"
                )
        return super().forward(q, k, v, rule, view)


def _check_size(q: Tensor, weight: Tensor) -> None:
    if q.shape[3] != weight.shape[0]:
        raise ValueError(f"the head size is {q.shape[3]}; expected {weight.shape[0]}, for which this scoring was made")
