"""A budget of key/value memory, spent where it buys most: one price per token for all heads.

What is minimised is Σ_h cost_h(w_h) + λ · Σ_h w_h, with w_h the tokens head h keeps: an L1 penalty on spans. The weight
λ is not a setting. It is the price at which the heads together ask for just the budget, found exactly where the costs
are known as curves (`allocate`), and followed step by step where only their slopes are (`Price`).

Shapes: L layers, H key/value heads of a layer, G windows tried of each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """How much of a full cache may be kept: `share` of `context` tokens for every head, sinks included."""

    share: float
    context: int
    sinks: int

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"budget is {self.share:g}; expected a share of the full key/value memory, up to 1")
        if self.sinks + 1 >= self.context:
            raise ValueError(
                f"sinks is {self.sinks} of {self.context} tokens of context; expected at least two tokens beside them"
            )
        if self.tokens < self.sinks + 1:
            raise ValueError(
                f"budget is {self.share:g}, {self.tokens:.1f} of {self.context} tokens a head, but {self.sinks} sinks "
                f"and the token itself take {self.sinks + 1}; ask for {(self.sinks + 1) / self.context:.4f} or more, "
                "or for fewer sinks"
            )

    @property
    def tokens(self) -> float:
        """what a head may keep on average, sinks included"""
        return self.share * self.context

    @property
    def longest(self) -> int:
        """the longest window: with the sinks it is the whole context"""
        return self.context - self.sinks

    def share_of(self, windows: Tensor) -> float:
        """The share of a full cache that these windows and their sinks keep; a key with any weight counts whole."""
        kept = (windows.double().ceil() + self.sinks).clamp(max=self.context)
        return float(kept.mean()) / self.context

    def fit(self, windows: Tensor, *, shortest: float = 1.0, spare: float = 0.0) -> Tensor:
        """The windows times one factor, so that their mean is the budget's, each from `shortest` to the longest.

        A window that would be longest may be longer by up to `spare` tokens, so that a soft edge centred on it dims
        nothing; it is counted as the longest.
        """
        goal = self.tokens - self.sinks
        low, high = 0.0, self.longest / max(float(windows.min()), 1e-9)
        for _ in range(60):  # the mean grows with the factor: halve the interval
            middle = (low + high) / 2
            small = float((windows * middle).clamp(shortest, self.longest).mean()) < goal
            low, high = (middle, high) if small else (low, middle)
        return (windows * low).clamp(shortest, self.longest + spare)

    def whole(self, windows: Tensor) -> Tensor:
        """Whole tokens, as a cache keeps them, and never more than the budget: [L, H] int64."""
        found = windows.clamp(1, self.longest).floor().long()
        spare = int(self.tokens * found.numel() + 1e-6) - int((found + self.sinks).sum())
        order = (windows - found).flatten().argsort(descending=True)
        room = found.flatten()
        for index in order.tolist():
            if spare > 0 and room[index] < self.longest:
                room[index] += 1
                spare -= 1
        return room.view_as(found)


def allocate(costs: Tensor, grid: list[int], budget: Budget) -> tuple[Tensor, float]:
    """Windows [L, H] that cost least within the budget, and λ, what the last token bought.

    costs [L, H, G]: what it costs to keep grid[g] tokens beside the sinks (any unit); the longest window costs nothing.
    A curve counts by its lower convex hull: between two windows tried, cost is taken as linear, and a window that is
    worse than such a mixture of its neighbours is passed over.
    """
    if sorted(set(grid)) != grid or grid[0] < 1 or grid[-1] > budget.longest:
        raise ValueError(f"grid is {grid}; expected rising windows of 1 to {budget.longest} tokens")
    tried = [*grid, budget.longest] if grid[-1] < budget.longest else grid
    flat = costs.reshape(-1, len(grid)).double().tolist()
    windows, pieces = [], []
    for head, curve in enumerate(flat):
        points = list(zip(tried, [*curve, 0.0][: len(tried)], strict=True))
        hull = _hull(points)
        windows.append(float(hull[0][0]))
        for (w0, c0), (w1, c1) in itertools.pairwise(hull):
            pieces.append(((c0 - c1) / (w1 - w0), head, w1 - w0))
    spare = (budget.tokens - budget.sinks) * len(flat) - sum(windows)
    if spare < 0:  # even the shortest windows tried are too long: all alike
        return torch.full(costs.shape[:2], budget.tokens - budget.sinks), math.inf
    price = 0.0
    for slope, head, more in sorted(pieces, reverse=True):
        price = slope
        taken = min(more, spare)
        windows[head] += taken
        spare -= taken
        if spare <= 0:
            break
    return torch.tensor(windows).view(costs.shape[:2]), price


def _hull(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The lower convex hull of a curve that falls: slopes rise towards 0."""
    hull: list[tuple[int, float]] = []
    for w, c in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (w - hull[-2][0]) >= (c - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((w, c))
    while len(hull) > 1 and hull[-1][1] >= hull[-2][1]:  # a longer window that costs more is bought for nothing
        hull.pop()
    return hull


class Price:
    """λ, the weight of the L1 penalty that keeps the budget, where the cost's slopes are all that is known.

    With slopes s_h = ∂ cost / ∂ w_h, a token more is worth −s_h to head h. At λ = mean(−s) one step of descent on
    cost + λ · Σ w leaves Σ w as it was: tokens only change hands, from heads that value them less to heads that value
    them more. Averaged over steps, because one text's slopes are noisy; never negative.
    """

    def __init__(self, first: float, memory: float = 0.8) -> None:
        self.weight, self.memory = first, memory

    def step(self, slopes: Tensor) -> float:
        self.weight = self.memory * self.weight + (1 - self.memory) * max(0.0, -float(slopes.mean()))
        return self.weight
