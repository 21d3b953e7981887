"""Attention transfer: linear states learn, layer by layer, to return what full attention loses at its windows.

As the first stage of LoLCATs (https://arxiv.org/abs/2410.10254): the full model reads a text once, and each layer's
queries, keys and values then train that layer's features alone, by

    Σ_t |out_t − full_t|² / Σ_t |cut_t − full_t|²        for each head

where `full` is full attention, `cut` a window alone and `out` the window with its state. A step of one layer takes a
hundredth of a step of the whole model. The masses of far keys begin at the median of what they are in the full model:
begun lower, features get hardly any gradient.

Shapes: L layers, H query heads, Hkv key/value heads, T tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.attention import Seen
from spanformer.hf.far import FarMap, attend_beyond, far_of, far_part
from spanformer.hf.spans import NAME, HeadSpans, head_spans, unwrap
from spanformer.hf.text import TextChunks
from spanformer.hf.watch import attention_replaced
from spanformer.ops import Attended, Rule, attend

IMPLEMENTATION = "spanformer_transfer"


@dataclass(frozen=True)
class TransferConfig:
    rounds: int = 2
    """how often each text is read"""
    steps: int = 10
    """steps of every layer on each text it reads"""
    lr: float = 0.03
    """learning rate of Adam at first; falls to a twentieth"""


class Sample(NamedTuple):
    """One layer's attention over one text: without gradients."""

    spans: HeadSpans
    q: Tensor
    k: Tensor
    v: Tensor
    full: Attended
    cut: Attended


def transfer(
    model: PreTrainedModel, texts: TextChunks, config: TransferConfig, on_progress: OnCount | None = None
) -> None:
    """Train the features of every layer for its windows as they are now. The texts are read by the full model."""
    maps = {layer: far for layer in head_spans(model).values() if (far := far_of(layer)) is not None}
    adams = {layer: torch.optim.Adam(far.parameters(), lr=config.lr) for layer, far in maps.items()}
    for far in maps.values():
        far.requires_grad_(True)
    total, done, begun = config.rounds * len(texts), 0, set()
    for _ in range(config.rounds):
        for row in texts.ids:
            for sample in read_samples(model, row):
                layer, far = sample.spans, maps[sample.spans]
                if layer not in begun:
                    set_mass(far, sample)
                    begun.add(layer)
                for step in range(config.steps):
                    for group in adams[layer].param_groups:
                        group["lr"] = config.lr * (1 - 0.95 * (done + step / config.steps) / total)
                    _step(far, sample, adams[layer])
            done += 1
            if on_progress:
                on_progress(done, total)
    for far in maps.values():
        far.requires_grad_(False)


@torch.no_grad()
def errors_left(model: PreTrainedModel, texts: TextChunks) -> Tensor:
    """[L, Hkv] the share of the squared error of a window alone that is left with its state; 1 without a state."""
    layers = list(head_spans(model).values())
    sums = torch.zeros(2, len(layers), layers[0].groups, dtype=torch.float64)
    for row in texts.ids:
        for sample in read_samples(model, row):
            for n, error in enumerate(_errors(sample)):
                sums[n, layers.index(sample.spans)] += error.double().unflatten(0, (sample.spans.groups, -1)).sum(1)
    return torch.where(sums[1] > 0, sums[0] / sums[1].clamp(min=1e-30), 1.0).float()


def read_samples(model: PreTrainedModel, row: Tensor) -> list[Sample]:
    """The samples of all layers with states, on one text [T]."""
    found: list[Sample] = []

    def watch(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask, scaling: float | None = None, **_others):
        spans = unwrap(module._modules[NAME])
        assert isinstance(spans, HeadSpans)
        full = attend(q, k, v, Rule(q.shape[1], reach=spans.window), scale=scaling)
        if far_of(spans) is not None:
            found.append(Sample(spans, q, k, v, full, attend(q, k, v, spans.rule(), scale=scaling)))
        return full.out.transpose(1, 2), None

    with attention_replaced(model, IMPLEMENTATION, watch), torch.no_grad():
        model.base_model(input_ids=row[None], use_cache=False)
    return found


@torch.no_grad()
def set_mass(far: FarMap, sample: Sample) -> None:
    """Set c so that far keys have the mass that they have in the full model, at the median query."""
    heads, spans = far.heads_on(), sample.spans
    lost = sample.cut.lse[0, heads].double() + (sample.full.lse - sample.cut.lse)[0, heads].double().expm1().log()
    far.mass_bias[heads] = 0.0
    hidden = (torch.arange(sample.k.shape[2], device=sample.k.device) < spans.sink_tokens)[None]
    some_heads = far.kv_on()
    parts = sample.q[:, heads], sample.k[:, some_heads], sample.v[:, some_heads]
    held = far_part(far, spans, *parts, hidden).lse[0].double()
    for n, head in enumerate(heads):
        some = lost[n].isfinite() & held[n].isfinite()
        if bool(some.any()):
            far.mass_bias[head] = float((lost[n] - held[n])[some].median())


def _step(far: FarMap, sample: Sample, adam: torch.optim.Optimizer) -> None:
    with torch.enable_grad():
        left, lost = _errors(sample)
        heads = far.heads_on()
        loss = (left / lost.clamp(min=1e-30))[heads].sum()
        adam.zero_grad()
        loss.backward()
    adam.step()


def _errors(sample: Sample) -> tuple[Tensor, Tensor]:
    """[H] squared errors of the window with its state, and of the window alone."""
    full, far = sample.full.out.float(), sample.spans.far
    assert far is not None
    near = Attended(sample.cut.out.float(), sample.cut.lse.float())
    out = attend_beyond(far, sample.spans, near, sample.q, sample.k, sample.v, Seen(full.shape[2], None))
    left, lost = ((x - full).square().sum((0, 2, 3)) for x in (out, near.out))
    return left, lost
