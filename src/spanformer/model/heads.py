"""Heads of a self-attention layer, one by one: leave one out, or let two change places."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spanformer.model.layer import SelfAttention


def _rows(layer: SelfAttention, head: int) -> slice:
    return slice(head * layer.head_dim, (head + 1) * layer.head_dim)


@contextmanager
def without_head(layer: SelfAttention, head: int) -> Iterator[None]:
    """The layer's output without what this query head adds to it."""
    weight, columns = layer.out.weight.data, _rows(layer, head)
    kept = weight[:, columns].clone()
    weight[:, columns] = 0
    try:
        yield
    finally:
        weight[:, columns] = kept


@torch.no_grad()
def swap_heads(layer: SelfAttention, first: int, second: int) -> None:
    """Let the weights of two heads change places. Their mechanisms, such as spans, stay where they are."""
    if layer.kv_heads != layer.heads:
        raise ValueError(f"layer has {layer.kv_heads} KV heads for {layer.heads} query heads; expected one for each")
    order = list(range(layer.heads))
    order[first], order[second] = second, first
    places = torch.cat([torch.arange(layer.heads * layer.head_dim)[_rows(layer, head)] for head in order])
    for projection in (layer.query, layer.key, layer.value):
        projection.weight.copy_(projection.weight[places].clone())
        if projection.bias is not None:
            projection.bias.copy_(projection.bias[places].clone())
    layer.out.weight.copy_(layer.out.weight[:, places].clone())
