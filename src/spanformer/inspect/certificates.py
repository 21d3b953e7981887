"""Certificates of retrieval heads: for every query, a bound on the share of attention that it left out.

Shapes: B batch, H heads, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from spanformer.attention import Retrieval


@contextlib.contextmanager
def certificates(model: nn.Module) -> Iterator[Callable[[], list[Tensor]]]:
    """Collect them while a model runs. The value is a function that returns, for each mechanism that retrieves,
    [B, H, T]: what keys outside the ring that were not retrieved have of full attention's weight, at most."""
    watched: list[tuple[Retrieval, list[Tensor]]] = [(m, []) for m in model.modules() if isinstance(m, Retrieval)]
    for m, shares in watched:
        m.omitted = shares
    try:
        yield lambda: [torch.cat(shares, 2) for _, shares in watched if shares]
    finally:
        for m, _ in watched:
            m.omitted = None
