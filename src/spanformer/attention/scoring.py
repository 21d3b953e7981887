"""How well a query and a key go together, other than by their scaled product.

    Dot         q·k                  Luong, Pham, Manning, 2015: multiplicative, "dot"
                                     https://arxiv.org/abs/1508.04025
    General     q·W·k                Luong, Pham, Manning, 2015: multiplicative, "general"
                                     https://arxiv.org/abs/1508.04025
    Bilinear    (q·W + w)·k          Dozat, Manning, 2017: biaffine, without what a softmax does not feel
                                     https://arxiv.org/abs/1611.01734
    Additive    v·tanh(W·q + U·k)    Bahdanau, Cho, Bengio, 2015
                                     https://arxiv.org/abs/1409.0473

Scaled dot-product, q·k / √D (Vaswani et al., 2017), is what every mechanism does by itself. All heads share the
weights: heads differ by their projections. The first three map the queries and leave the rest to `attend`, so that they
go with every rule, position, backend and cache; a distance_vec is read by mapped queries. Additive scores are no
products: they are computed by chunks, at the cost of all pairs that a chunk reaches times the inner size. They go with
every rule but distance_vec and distance_scale, and not with rotary positions, whose turns only a product undoes; a
cache refuses them.

Shapes: B batch, H heads, T queries, Tk keys, D head size, A inner size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.around import Around
from spanformer.attention.base import Attention, View
from spanformer.attention.chunked import Chunked, Content
from spanformer.ops import Attended, Rule


class Dot(Around):
    def map_queries(self, q: Tensor) -> Tensor:
        return self.inner.map_queries(q) * math.sqrt(q.shape[3])  # attend divides by it


class General(Around):
    """W [D, D] starts as the identity, that is, as the dot product."""

    def __init__(self, inner: Attention, head_dim: int) -> None:
        super().__init__(inner)
        self.weight = nn.Parameter(torch.eye(head_dim))

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
    """No more than queries · keys · A numbers stand for a row of the batch and a head."""

    turnable = False

    def __init__(
        self, inner: Attention, head_dim: int, inner_dim: int = 0, *, queries: int = 64, keys: int = 256
    ) -> None:  # fmt: skip
        super().__init__(inner, queries=queries, keys=keys)
        size = inner_dim or head_dim
        self.query, self.key = (nn.Parameter(torch.randn(head_dim, size) / head_dim**0.5) for _ in range(2))
        """[D, A] each: W and U"""
        self.vector = nn.Parameter(torch.randn(size) / size**0.5)
        """[A]: v"""

    def content(self) -> tuple[Content, float | None]:
        def scores(q: Tensor, k: Tensor) -> Tensor:
            w, u, v = (t.to(q.dtype) for t in (self.query, self.key, self.vector))
            inner = ((q @ w)[:, :, :, None] + (k @ u)[:, :, None]).tanh()
            return (inner @ v[:, None]).squeeze(-1)  # a matrix of one column: PyTorch counts no products by vectors

        return scores, 1.0

    def mix(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View) -> Attended:
        _check_size(q, self.query)
        for name in ("distance_vec", "distance_scale"):
            if any(getattr(part, name) is not None for _, part in rule.parts()):
                raise ValueError(
                    f"{name} is a term of the product of query and key, and additive scores have none; use a "
                    "distance_bias, or another scoring"
                )
        return super().mix(q, k, v, rule, view)


def _check_size(q: Tensor, weight: Tensor) -> None:
    if q.shape[3] != weight.shape[0]:
        raise ValueError(f"heads have size {q.shape[3]}; this scoring is made for {weight.shape[0]}")
