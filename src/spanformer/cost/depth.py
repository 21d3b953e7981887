"""The cost of decoding a token, by the number of layers that it runs through.

Depth-Adaptive Transformer (Elbayad, Gu, Grave, Auli, 2019), appendix B. https://arxiv.org/abs/1910.10073

L layers of width E, H query heads and G key/value heads of size D, F feed-forward weights, N persistent vectors per
head, a vocabulary of V, c keys that a head sees. A multiply and an add are two operations.

    layer      2·E·D·(2·H + 2·G) + 2·F + 4·D·Σ_heads (c + N)    a layer that the token runs through
    skipped    2·E·D·2·G                                        a later one projects its state to keys and values
    check      softmax 2·E·V, classifier 2·E, saturation 6·E    after each layer but the last, where it may leave
    output     2·E·V

With `model.depth.maps`, 2·E² are added to a check by softmax, and to the output of a token that leaves early. An exit
by softmax has already computed the output layer's logits there, and computes them again at the end. Weights are
counted once each: a universal stack has those of one block however many steps it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spanformer.core.shape import Shape
from spanformer.cost.attention import FORWARD

Check = Literal["none", "softmax", "classifier", "saturation"]


@dataclass(frozen=True)
class TokenCost:
    """Operations of one decoded token, by purpose."""

    layers: int
    """of layers that it runs through"""
    skipped: int
    """keys and values of later layers"""
    checks: int
    """of whether to leave"""
    output: int

    @property
    def total(self) -> int:
        return self.layers + self.skipped + self.checks + self.output


def token_cost(
    shape: Shape, reach: Sequence[Sequence[int]], context: int, depth: int, check: Check = "none", maps: bool = False
) -> TokenCost:
    """The cost of a token with `context` tokens before it that leaves after `depth` layers. reach: [layers][heads]
    number of distances that a head sees, its own token included. maps: exits are read through matrices."""
    if not 1 <= depth <= shape.layers:
        raise ValueError(f"depth is {depth}; expected 1 … {shape.layers}, the model's layers")
    if context < 0:
        raise ValueError(f"context is {context}; expected 0 or more tokens")
    if len(reach) != shape.layers:
        raise ValueError(f"reach has {len(reach)} layers; expected {shape.layers}")
    weights = shape.dim * shape.head_dim
    dense = 2 * (weights * 2 * (shape.heads + shape.kv_heads) + shape.feedforward)
    pairs = sum(min(r, context + 1) + shape.persistent for layer in reach[:depth] for r in layer)
    output, mapped = 2 * shape.dim * shape.vocab, 2 * shape.dim**2 * maps
    each = {"none": 0, "softmax": output + mapped, "classifier": 2 * shape.dim, "saturation": 6 * shape.dim}[check]
    return TokenCost(
        layers=depth * dense + FORWARD * shape.head_dim * pairs,
        skipped=(shape.layers - depth) * 2 * weights * 2 * shape.kv_heads,
        checks=min(depth, shape.layers - 1) * each,
        output=output + mapped * (depth < shape.layers),
    )


def mean_cost(
    shape: Shape, reach: Sequence[Sequence[int]], context: int, depths: Sequence[float], check: Check = "none"
) -> float:
    """The mean operations of tokens, of which a share depths[n − 1] leaves after n layers."""
    if len(depths) != shape.layers or abs(sum(depths) - 1) > 1e-6 or min(depths) < 0:
        raise ValueError(f"depths is {list(depths)}; expected {shape.layers} shares that sum to 1")
    each = (token_cost(shape, reach, context, n, check).total for n in range(1, shape.layers + 1))
    return sum(share * cost for share, cost in zip(depths, each, strict=True))
