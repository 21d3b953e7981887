"""Every other token of a window, a mechanism from outside the package; and a position encoding, log distances.

    a_ij ∝ exp(s_ij)                  for i − j = 0, 2, 4, … < w
    s_ij −= log(1 + |i − j|)          with log_distance positions

All that a package of your own needs: the classes, their specs, and one line, `register(KIND)`. ORACLE and SCORES are
for the product test.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.cost.mechanisms import Cost
from spanformer.kinds import INHERIT, HeadSpec, Kind, PositionKind, PositionSpec
from spanformer.ops import Rule
from spanformer.position import Position
from support.oracles import seen


class EveryOther(Attention):
    def __init__(self, heads: int, window: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.window, self.causal = heads, window, causal

    @classmethod
    def build(cls, spec: HeadSpec) -> EveryOther:
        return cls(spec.heads, spec.p.window, causal=spec.causal)

    def rule_needs(self):
        return "positions"  # a KV cache serves strides only with keys laid out in order

    def rule(self, view: View) -> Rule:
        return Rule(self.heads, causal=self.causal, reach=self.window, stride=2)

    def context_length(self) -> list[int]:
        return [self.window - 1] * self.heads


def pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    before = sum(min(i, p.window - 1) // 2 for i in range(n))
    return n + before * (1 if causal else 2)


KIND = Kind(
    "every_other",
    "every other token among the last `window`",
    "support.outside:EveryOther.build",
    params={"window": INHERIT},
    cost=Cost("window/2", pairs, lambda n, p: min(n, p.window)),
    drawn="every_other(12)",
    timed="every_other(256)",
    tested=("every_other(9)",),
)


def oracle(m, x: Tensor, p: SimpleNamespace) -> Tensor:
    return seen(x, lambda i, j: abs(i - j) < p.window and (i - j) % 2 == 0)


class LogDistance(Position):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    @classmethod
    def build(cls, spec: PositionSpec) -> LogDistance:
        return cls(spec.heads)

    def rule(self, view, length: int) -> Rule:
        bias = -torch.arange(max(length, 1), dtype=torch.float64).log1p()
        return Rule(self.heads, causal=False, distance_bias=bias.expand(self.heads, -1))


POSITION = PositionKind(
    "log_distance",
    "less for each token in between, by its logarithm",
    "support.outside:LogDistance.build",
    cost="one addition a pair",
)


def scores(position, q: Tensor, k: Tensor, content, d: Tensor, causal: bool) -> Tensor:
    return content(q, k) - d.abs().double().log1p()
