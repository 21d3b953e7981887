"""Divides a budget of tokens among heads by one price per token: KV memory for `fit-spans`, attention's cost for
training from scratch (span_budget.py).

It minimises Σ_h cost_h(w_h) + λ · Σ_h w_h, where head h keeps w_h tokens: an L1 penalty on spans. The weight
λ is not a setting. It is the price at which the heads together use exactly the budget: computed exactly if the costs
are known as curves (`allocate`), and updated step by step if only their slopes are (`Price`).

Shapes: L layers, H key/value heads of a layer, G windows tried of each.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Budget:
    """A `share` of the full KV cache: the share of `context` tokens that all heads keep, sink tokens included."""

    share: float
    context: int
    sink_tokens: int
    own: tuple[int | None, ...] = ()
    """[L] the sliding window of each layer, None for none; empty: no layer has one. A layer with a window
    keeps only that window in a full cache, and has no sink tokens"""
    states: float = 0.0
    """bytes of linear states, in tokens per head: they leave that much less for windows"""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"budget is {self.share:g}; expected a share of the full key/value memory, up to 1")
        if self.sink_tokens < 0:
            raise ValueError(f"sink_tokens is {self.sink_tokens}; expected a number of tokens, at least 0")
        if self.sink_tokens + 1 >= self.context:
            raise ValueError(
                f"sink_tokens is {self.sink_tokens} of {self.context} tokens of context; expected at least two tokens "
                "beside them"
            )
        if self.share < self.least:
            need = float((self.aside + 1).double().mean()) + self.states
            state, fewer = (", with its state,", "sink tokens or far features") if self.states else ("", "sink tokens")
            raise ValueError(
                f"budget is {self.share:g}, {self.tokens:.1f} of {float(self.full.double().mean()):g} tokens a head, "
                f"but {self.sink_tokens} sink tokens and the token itself{state} take {need:g}; ask for "
                f"{self.least:.4f} or more, or for fewer {fewer}"
            )

    @cached_property
    def full(self) -> Tensor:
        """[L or 1, 1] tokens that a head of the layer keeps in a full cache."""
        return torch.tensor([[min(self.context, window or self.context)] for window in self.own or (None,)])

    @cached_property
    def aside(self) -> Tensor:
        """[L or 1, 1] sinks of the layer"""
        return torch.tensor([[self.sink_tokens if window is None else 0] for window in self.own or (None,)])

    @property
    def longest(self) -> Tensor:
        """[L or 1, 1] the longest window: with the sinks it is the full cache"""
        return self.full - self.aside

    @property
    def tokens(self) -> float:
        """mean tokens per head, sink tokens included"""
        return self.share * float(self.full.double().mean())

    @property
    def least(self) -> float:
        """the smallest share: sink tokens and the token itself"""
        return float((self.aside + 1 + self.states).double().sum() / self.full.sum().double())

    def share_of(self, windows: Tensor) -> float:
        """The share of a full cache that these windows and their sinks keep; a key with any weight counts fully."""
        kept = torch.minimum(windows.double().ceil() + self.aside, self.full.double())
        return float((kept.sum() + self.states * kept.numel()) / self.full.expand_as(windows).sum())

    def unlimited(self, windows: Tensor) -> Tensor:
        """[L, H] the growth of these windows in longer texts: 1 for a head that keeps the whole context, which is
        unlimited, and 0 for others, and in layers with a sliding window of their own."""
        free = torch.tensor([[window is None] for window in self.own or (None,)])
        return ((windows >= self.longest) & free).float()

    def fit(self, windows: Tensor, *, shortest: float | Tensor = 1.0, spare: float | Tensor = 0.0) -> Tensor:
        """The windows times one factor, so that their mean is the budget, each from `shortest` to the longest.

        A window that would be longest may be longer by up to `spare` tokens, so that a soft edge centred on it dims
        nothing; it is counted as the longest.
        """
        goal = self.tokens - self.states - float(self.aside.double().mean())
        low, high = 0.0, int(self.longest.max()) / max(float(windows.min()), 1e-9)
        for _ in range(60):  # the mean grows with the factor: halve the interval
            middle = (low + high) / 2
            small = float((windows * middle).clamp(min=shortest).minimum(self.longest).mean()) < goal
            low, high = (middle, high) if small else (low, middle)
        return (windows * low).clamp(min=shortest).minimum(self.longest + spare)

    def whole(self, windows: Tensor) -> Tensor:
        """Windows rounded to whole tokens within the budget: [L, H] int64."""
        longest = self.longest.expand_as(windows)
        found = windows.clamp(min=1).minimum(longest).floor().long()
        spare = int((self.tokens - self.states) * found.numel() + 1e-6) - int((found + self.aside).sum())
        order = (windows - found).flatten().argsort(descending=True)
        room, most = found.flatten(), longest.flatten()
        for index in order.tolist():
            if spare > 0 and room[index] < most[index]:
                room[index] += 1
                spare -= 1
        return room.view_as(found)


def allocate(costs: Tensor, grid: list[int], budget: Budget) -> tuple[Tensor, float]:
    """Windows [L, H] of least cost within the budget, and λ, the gain of the last token.

    costs [L, H, G]: what it costs to keep grid[g] tokens beside the sinks (any unit); the longest window costs nothing.
    A curve is replaced by its lower convex hull: cost is linear between two windows, and a window that is
    worse than a mixture of its neighbours is skipped.
    """
    most = budget.longest.expand(costs.shape[:2]).flatten().tolist()
    if sorted(set(grid)) != grid or grid[0] < 1 or grid[-1] > budget.context:
        raise ValueError(f"grid is {grid}; expected increasing windows of 1 to {budget.context} tokens")
    windows, pieces = [], []
    for head, (curve, longest) in enumerate(zip(costs.flatten(0, 1).double().tolist(), most, strict=True)):
        points = [(w, c) for w, c in zip(grid, curve, strict=True) if w <= longest]
        hull = _hull(points if points and points[-1][0] == longest else [*points, (longest, 0.0)])
        windows.append(float(hull[0][0]))
        for (w0, c0), (w1, c1) in itertools.pairwise(hull):
            pieces.append(((c0 - c1) / (w1 - w0), head, w1 - w0))
    spare = (budget.tokens - budget.states) * len(most) - int(budget.aside.expand(costs.shape[:2]).sum()) - sum(windows)
    if spare < 0:  # even the shortest windows tried exceed the budget: use equal ones
        return budget.fit(torch.ones(costs.shape[:2])), math.inf
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
    """The lower convex hull of a decreasing curve: slopes rise towards 0."""
    hull: list[tuple[int, float]] = []
    for w, c in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (w - hull[-2][0]) >= (c - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((w, c))
    while len(hull) > 1 and hull[-1][1] >= hull[-2][1]:  # drop a longer window that costs more
        hull.pop()
    return hull


class Price:
    """λ, the weight of the L1 penalty that keeps the budget, if only the slopes of the cost are known.

    With slopes s_h = ∂ cost / ∂ w_h, a token more is worth −s_h to head h. At λ = mean(−s) one step of descent on
    cost + λ · Σ w leaves Σ w as it was: tokens only move from heads with a small slope to heads with
    a large one. Averaged over steps, because one text's slopes are noisy; never negative.
    """

    def __init__(self, first: float, memory: float = 0.8) -> None:
        self.weight, self.memory = first, memory

    def step(self, slopes: Tensor) -> float:
        self.weight = self.memory * self.weight + (1 - self.memory) * max(0.0, -float(slopes.mean()))
        return self.weight
