"""Windows of a model some of whose KV heads retrieve, within the RAM of an 8-bit KV cache.

A retrieving head holds a ring, and a code and a scale (D + 4 bytes) for every older key; the keys and values may lie in
a file. Another head holds its window, 2·D + 8 bytes a token. The budget counts all of them.

Shapes: L layers, H key/value heads of a layer.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spanformer.hf.controller import Budget, allocate
from spanformer.hf.survey import Survey

RING, K = 64, 64
"""tokens of a retrieving head's ring, and keys that each of its queries reads beside them"""
CODE = 0.5
"""a token's code over the 8-bit key and value of another head: (D + 4) / (2·D + 8)"""


def retrieval_windows(found: Survey, windows: Tensor, share: float, budget: Budget) -> Tensor:
    """Windows [L, H] for the same RAM as `windows`, if this share of heads, those with the longest windows, retrieves:
    these are as long as the context, so that `retrieve` chooses them; the survey divides the rest."""
    if not 0 < share <= 1:
        raise ValueError(f"retrieve is {share:g}; expected a share of the KV heads, above 0 and at most 1")
    count = max(1, round(share * windows.numel()))
    chosen = torch.zeros(windows.numel(), dtype=torch.bool)
    chosen[windows.flatten().argsort(descending=True, stable=True)[:count]] = True
    chosen = chosen.view(windows.shape)
    taken = count * (CODE + (RING + budget.sink_tokens) / budget.context) / windows.numel()
    left = budget.share - taken
    others = 1 - count / windows.numel()
    if left < others * (budget.sink_tokens + 1) / budget.context:
        raise ValueError(
            f"retrieve is {share:g} with a budget of {budget.share:g}: codes and rings of {count} heads take "
            f"{taken:.3f} of an 8-bit KV cache; ask for a larger budget or a smaller share of heads"
        )
    costs = found.costs.clone()
    costs[chosen] = 0  # so that they get the shortest windows; their rings are counted above
    spare = float(chosen.sum()) * (1 + budget.sink_tokens) / budget.context / windows.numel()
    rest = replace(budget, share=left + spare)
    made = rest.whole(allocate(costs, found.grid, rest)[0])
    longest = budget.longest.expand_as(made)
    return torch.where(chosen, longest, made.minimum(longest - 1))


def ram_share(windows: Tensor, chosen: Tensor, budget: Budget) -> float:
    """The share of a full 8-bit KV cache that these windows, and codes and rings of the chosen heads, take."""
    context, sinks = budget.context, budget.sink_tokens
    each = torch.where(chosen, CODE * (context - sinks) + RING + sinks, (windows + sinks).clamp(max=context).double())
    return float(each.sum() / (context * windows.numel()))
