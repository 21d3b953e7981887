"""Which KV heads of a model retrieve, and the windows of all others, within the RAM of an 8-bit KV cache.

A retrieving head holds a ring, and a code and a scale (D + 4 bytes) for every older key, unless the codes lie in a file
as its keys and values may. Another head holds its window, 2·D + 8 bytes a token. The budget counts everything in RAM.

The survey prices every head with each window, and with each ring and a search behind it. Heads buy at one price λ per
token, as in `allocate`: those retrieve that gain most by it at that price. A head retrieves wholly or not at all, so
λ is tried on a grid, and the allocation with the least cost in all is taken. The windows of the others are then learned
(`learn`) with `BesideRetrieval` as the budget; meanwhile a retrieving head sees everything.

Shapes: L layers, H key/value heads of a layer, G windows and R rings surveyed, N = L·H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from spanformer.hf.survey import Survey
from spanformer.model.budget import Budget, allocate

RINGS = (32, 64, 128, 256)
"""rings that are surveyed, in tokens"""
CODE = 0.5
"""a token's code in RAM over the 8-bit key and value of another head: (D + 4) / (2·D + 8)"""
PRICES = 40
"""prices that are tried, from the dearest token to one of a billionth of that"""


@dataclass(frozen=True, eq=False)
class Allocation:
    windows: Tensor
    """[L, H] tokens beside the sinks; as long as the context where a head retrieves, so that `retrieve` chooses it"""
    chosen: Tensor
    """[L, H] bool: heads that retrieve"""
    ring: int
    cost: float
    """by the survey, the sum over heads"""
    others: Budget | None = None
    """of the heads that do not retrieve, each a layer of its own; None: all retrieve"""
    price: float = 0.0
    """λ, the gain of the last token of their windows"""

    @property
    def share(self) -> float:
        """of the heads that retrieve"""
        return float(self.chosen.double().mean())


@dataclass(frozen=True, eq=False)
class BesideRetrieval(Budget):
    """A budget of which retrieving heads take their rings and codes, and the windows of the others what is left."""

    made: Allocation = field(kw_only=True)

    def fit(self, windows: Tensor, *, shortest: float | Tensor = 1.0, spare: float | Tensor = 0.0) -> Tensor:
        found = (self.longest + spare).expand_as(windows).to(windows).clone()
        if self.made.others is not None:
            rest = windows[~self.made.chosen][:, None]
            found[~self.made.chosen] = self.made.others.fit(rest, shortest=shortest, spare=spare)[:, 0]
        return found

    def whole(self, windows: Tensor) -> Tensor:
        found = self.longest.expand_as(windows).clone()
        if self.made.others is not None:
            rest = self.made.others.whole(windows[~self.made.chosen][:, None])[:, 0]
            found[~self.made.chosen] = rest.minimum(found[~self.made.chosen] - 1)  # so that `retrieve` leaves them out
        return found


def beside_retrieval(budget: Budget, made: Allocation) -> BesideRetrieval:
    return BesideRetrieval(budget.share, budget.context, budget.sink_tokens, budget.own, made=made)


def rings_within(context: int, sink_tokens: int) -> list[int]:
    """Rings worth a survey: those that leave something to search."""
    return [ring for ring in RINGS if ring < (context - sink_tokens) // 2] or [1]


def allocate_retrieval(found: Survey, share: float, budget: Budget, *, code: float = CODE) -> Allocation:
    """The allocation of least cost in which at most this share of heads, and at least one, retrieves. code: RAM of a
    stored token, over the 8-bit key and value of another head; 0: codes lie in a file."""
    if not 0 < share <= 1:
        raise ValueError(f"retrieve is {share:g}; expected a share of the KV heads, above 0 and at most 1")
    if found.retrieved is None:
        raise ValueError("the survey has no prices of retrieving heads; survey the model with rings")
    made = [_least(found, n, share, budget, code) for n in range(len(found.rings))]
    possible = [each for each in made if each is not None]
    if not possible:
        least = ring_tokens(found.rings[0], budget, code)
        raise ValueError(
            f"retrieve is {share:g} with a budget of {budget.share:g}: a head with a ring of {found.rings[0]} tokens "
            f"and its codes takes {least:.0f} tokens of an 8-bit KV cache, which the other heads cannot spare; ask for "
            "a larger budget, or keep the codes in a file"
        )
    return min(possible, key=lambda each: each.cost)


def ring_tokens(ring: int, budget: Budget, code: float) -> float:
    """RAM of a retrieving head without its sinks, in tokens of an 8-bit KV cache."""
    return ring + code * (budget.context - budget.sink_tokens - ring)


def ram_tokens(windows: Tensor, made: Allocation, budget: Budget, *, code: float = CODE) -> Tensor:
    """[L, H] tokens of an 8-bit KV cache that windows, rings and codes take in RAM."""
    kept = torch.where(made.chosen, ring_tokens(made.ring, budget, code), windows.double())
    return (kept + budget.aside).minimum(budget.full.double())


def _least(found: Survey, n: int, share: float, budget: Budget, code: float) -> Allocation | None:
    """With ring n of the survey; None: it does not fit."""
    assert found.retrieved is not None
    ring, costs, here = found.rings[n], found.costs.flatten(0, 1).double(), found.retrieved.flatten(0, 1)[:, n].double()
    most = max(1, math.floor(share * len(costs) + 1e-9))
    grid = torch.tensor([float(w) for w in found.grid], dtype=torch.float64)
    dearest = float((costs / grid).max())
    sets: list[Tensor] = []
    for step in range(PRICES + 1):
        price = dearest * 1e-9 ** (step / PRICES)
        gain = (costs + price * grid).amin(1) - (here + price * ring_tokens(ring, budget, code))
        chosen = torch.zeros(len(costs), dtype=torch.bool)
        best = gain.argsort(descending=True, stable=True)[:most]
        chosen[best[(gain[best] > 0) | (best == best[0])]] = True
        if not any(torch.equal(chosen, other) for other in sets) and bool(here[chosen].isfinite().all()):
            sets.append(chosen)
    made = [_filled(found, chosen, ring, float(here[chosen].sum()), budget, code) for chosen in sets]
    return min((each for each in made if each is not None), key=lambda each: each.cost, default=None)


def _filled(
    found: Survey, chosen: Tensor, ring: int, cost: float, budget: Budget, code: float
) -> Allocation | None:  # fmt: skip
    """The best windows of heads [N] that are not chosen; if all are, the longest ring."""
    shape, longest = found.costs.shape[:2], budget.longest.expand(found.costs.shape[:2]).flatten()
    total = budget.share * float(budget.full.expand(shape).sum())
    left = total - float(chosen.sum()) * (ring_tokens(ring, budget, code) + budget.sink_tokens)
    if bool(chosen.all()):
        if left < 0:
            return None
        ring = min(ring + int(left / len(chosen) / (1 - code)), budget.context - budget.sink_tokens - 1)
        return Allocation(longest.view(shape), chosen.view(shape), ring, cost)
    own = budget.own or (None,) * shape[0]
    rest = tuple(own[head // shape[1]] for head in (~chosen).nonzero()[:, 0].tolist())
    full = sum(min(budget.context, window or budget.context) for window in rest)
    need = sum(1 if window else 1 + budget.sink_tokens for window in rest)
    if left < need:
        return None
    others = replace(budget, share=min(1.0, left / full), own=rest)
    curves = found.costs.flatten(0, 1)[~chosen]
    short, price = allocate(curves[:, None], found.grid, others)
    windows = longest.clone()
    windows[~chosen] = others.whole(short)[:, 0].minimum(longest[~chosen] - 1)
    cost += float(_on_curves(curves.double(), found.grid, longest[~chosen], windows[~chosen]).sum())
    return Allocation(windows.view(shape), chosen.view(shape), ring, cost, others, price)


def _on_curves(costs: Tensor, grid: list[int], longest: Tensor, windows: Tensor) -> Tensor:
    """[N] costs of windows between those of the grid, on straight lines; shorter ones cost as much as the shortest, and
    the longest nothing."""
    found = []
    for curve, most, window in zip(costs.tolist(), longest.tolist(), windows.tolist(), strict=True):
        points = [(w, c) for w, c in zip(grid, curve, strict=True) if w < most] + [(most, 0.0)]
        after = next(n for n, (w, _) in enumerate(points) if w >= window)
        (w0, c0), (w1, c1) = points[max(0, after - 1)], points[after]
        found.append(c1 if w1 == w0 else c0 + (c1 - c0) * (window - w0) / (w1 - w0))
    return torch.tensor(found, dtype=torch.float64)
