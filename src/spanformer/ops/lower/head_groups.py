"""HeadGroups: the queries, keys and values of each group of heads, with its rule.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.ops.head_groups import AnyRule
from spanformer.ops.rule import Rule
from spanformer.ops.union import Union


def split_heads(q: Tensor, k: Tensor, v: Tensor, rule: AnyRule) -> list[tuple[Tensor, Tensor, Tensor, Rule | Union]]:
    """q [B, H, Tq, D], k and v [B, Hkv, Tk, ·] and the rule of each group's heads."""
    if rule.heads != q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; expected {rule.heads} heads in q, as in the rule, "
            "and a number in k that divides it"
        )
    shared, found = q.shape[1] // k.shape[1], []
    for heads, part in rule.parts():
        first, end = heads[0], heads[-1] + 1
        if first % shared or end % shared:  # two groups share a key/value head: give each query head its own
            own = torch.tensor([h // shared for h in heads], device=k.device)
            some = k.index_select(1, own), v.index_select(1, own)
        else:
            some = k[:, first // shared : end // shared], v[:, first // shared : end // shared]
        found.append((q[:, first:end], *some, part))
    return found
