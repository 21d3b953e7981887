"""A trained language model gets a memory in one layer, as in Memorizing Transformers (Wu et al., 2022), §4.5."""

from __future__ import annotations

from dataclasses import replace

import torch

from spanformer.attention import Memorizing
from spanformer.model.config import AttentionConfig
from spanformer.model.lm import LM

GATE = -4.0
"""the logit of a new gate: σ(−4) = 0.018"""


def retrofit(trained: LM, layer: int, kind: str) -> LM:
    """A copy of a model whose layer (from 0) has heads of this kind, such as "memorizing(8192)". Its keys keep their
    length, as the model was trained with them, and its gates start near 0; all other weights are the model's."""
    config, layers = trained.config, trained.config.layers
    if not 0 <= layer < layers:
        raise ValueError(f"layer is {layer}; expected 0 … {layers - 1}, since the model has {layers} layers")
    if not kind.startswith("memorizing"):
        raise ValueError(f"kind is {kind!r}; expected memorizing(…), the only kind whose gate can start closed")
    inner = kind.removeprefix("memorizing").strip("()")
    kind = f"memorizing({inner}{', ' if inner else ''}unit=false)" if "unit" not in inner else kind
    stack = list(config.attention.stack) or [config.attention.kind]
    kinds = [stack[n % len(stack)] for n in range(layers)]
    kinds[layer] = kind
    lm = LM(replace(config, attention=replace(config.attention, kind=AttentionConfig.kind, stack=tuple(kinds))))
    weight = next(trained.parameters())
    lm = lm.to(weight.device, weight.dtype)
    found = lm.load_state_dict(trained.state_dict(), strict=False)
    prefix = f"blocks.{layer}.attention.mechanism."
    if odd := [name for name in (*found.missing_keys, *found.unexpected_keys) if not name.startswith(prefix)]:
        raise ValueError(f"{odd[0]} is in one of the two models only; expected them to differ in layer {layer} only")
    with torch.no_grad():
        for m in lm.mechanisms()[layer].modules():
            if isinstance(m, Memorizing) and m.gate is not None:
                m.gate.fill_(GATE)
    return lm.train(trained.training)
