"""Baselines at equal memory: windows that are not learned.

    uniform        every head keeps the same number of tokens, except layers whose sliding window is shorter
    local_global   five layers with a short window for each layer that keeps all, as in several published models
    by_mass        training-free: windows that lose the least attention, measured on calibration text

Each returns [L, H] whole windows, without sink tokens: L layers, H key/value heads of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.model.budget import Budget, allocate

LOCAL_LAYERS = 5
"""local layers per global layer"""


def uniform(layers: int, heads: int, budget: Budget) -> Tensor:
    return budget.whole(budget.fit(torch.ones(layers, heads)))


def local_global(layers: int, heads: int, budget: Budget) -> Tensor:
    """Every sixth layer keeps all tokens; the other layers share the rest of the budget evenly."""
    if budget.own:
        raise ValueError(
            "this model already has sliding windows; expected a model without them for the local_global baseline"
        )
    is_global = torch.arange(layers) % (LOCAL_LAYERS + 1) == LOCAL_LAYERS
    left = budget.tokens * layers - budget.context * int(is_global.sum())
    each = left / max(layers - int(is_global.sum()), 1) - budget.sink_tokens
    if each < 1:
        least = int(is_global.sum()) / layers
        raise ValueError(
            f"budget is {budget.share:g}, and the global layers alone take {least:.3f} of the memory; "
            f"{LOCAL_LAYERS} local layers per global layer need more than that"
        )
    windows = torch.full((layers, heads), each)
    windows[is_global] = float(budget.context - budget.sink_tokens)
    return budget.whole(windows)


def by_mass(lost: Tensor, grid: list[int], budget: Budget) -> Tensor:
    """lost [L, H, G]: the share of a head's attention that falls outside a window of grid[g] and the sinks, averaged
    over queries (`survey` measures it). The windows lose the least in total."""
    return budget.whole(allocate(lost, grid, budget)[0])
