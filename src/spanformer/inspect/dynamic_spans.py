"""The dynamic spans of every head along a text, token by token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.attention import DynamicSpan
from spanformer.model.lm import LM


@torch.no_grad()
def token_spans(model: LM, ids: Tensor) -> dict[str, Tensor]:
    """{"layer 1": [H, T] spans in tokens, …} for the text ids [T]; layers without dynamic spans are omitted.

    A forward pre-hook of each layer's attention receives the hidden states from which the spans are computed.
    """
    found: dict[str, Tensor] = {}

    def observe(name: str, part: DynamicSpan):
        def hook(_attention: nn.Module, arguments: tuple) -> None:
            found[name] = part.spans_of(arguments[0])[0]

        return hook

    hooks = [
        block.attention.register_forward_pre_hook(observe(f"layer {n}", part))
        for n, block in enumerate(model.layers(), 1)
        for part in block.modules()
        if isinstance(part, DynamicSpan)
    ]
    training = model.training
    model.eval()
    try:
        if hooks:
            model(ids[None])
    finally:
        model.train(training)
        for each in hooks:
            each.remove()
    return found
