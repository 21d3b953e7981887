"""What each key/value head would lose with a shorter window, measured for all heads and windows by a few passes over
text.

For head h and window w let δ be the change of the head's output when it sees w tokens and the sink_tokens instead of
all. Near the full model the predictions change by

    KL(full ‖ cut) ≈ ½ · δᵀ F δ        F = E_y[g gᵀ],   g = ∂ log p(y) / ∂ output,   y drawn from the full model itself

(F is the Fisher information), so one backward pass from drawn targets prices every head and window at once: the cost
is ½ E[(g · δ)²]. The mean of g is zero, so products of different queries cancel as far as their
effects on the predictions do not overlap; they are summed within blocks of queries and squared block by block.

The same passes measure the share of attention outside each window, which needs no gradients, and price retrieving heads
(retrieval_heads.py) alike: a ring, and the k best keys of everything before it; and whole layers whose heads have a
sink logit in place of sink tokens (layer_survey.py).

Shapes: L layers, H query heads, Hkv key/value heads, G windows and R rings tried, T tokens, D head size, Y drawings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.layer_survey import LayerCosts, LayerPrices, block_squares
from spanformer.hf.retrieval_heads import read_older
from spanformer.hf.spans import NAME, HeadSpans, unwrap
from spanformer.hf.text import TextChunks, hidden_states, logits_of
from spanformer.hf.watch import attention_replaced
from spanformer.ops import Attended, Rule, attend

IMPLEMENTATION = "spanformer_survey"


@dataclass(frozen=True, eq=False)
class Survey:
    """Both tables are [L, Hkv, G]: for a head that keeps grid[g] tokens besides the sink_tokens, while all others keep
    everything. A layer with its own sliding window has no sink_tokens, and loses nothing at that window and beyond."""

    grid: list[int]
    costs: Tensor
    """KL from the full model, in nats per token"""
    lost: Tensor
    """share of the attention that falls outside, averaged over queries from `start` on and the heads of a group"""
    rings: list[int] = field(default_factory=list)
    retrieved: Tensor | None = None
    """[L, Hkv, R] KL likewise for a head that keeps rings[r] tokens and the sink_tokens and retrieves; ∞ in a layer
    with its own sliding window. None: not surveyed"""
    layered: LayerCosts | None = None
    """of whole layers with the same windows, without sink tokens. None: not surveyed"""


def default_grid(longest: int) -> list[int]:
    """Windows to try: 16 tokens, then by halves and wholes of powers of two, all shorter than the longest."""
    steps = [16, 32, 64, 128, 192, 256, 384, 512, 768]
    while steps[-1] < longest:
        steps += [steps[-1] // 3 * 4, steps[-1] * 2]
    shorter = [w for w in steps if w < longest]
    return shorter or [1]


def survey(
    model: PreTrainedModel,
    texts: TextChunks,
    *,
    sink_tokens: int,
    grid: list[int] | None = None,
    rings: list[int] | None = None,
    k: int = 64,
    layers: bool = False,
    drawings: int = 4,
    seed: int = 0,
    on_progress: OnCount | None = None,
) -> Survey:
    """Survey a model with spans attached (their values are not used), one text at a time. rings: of retrieving heads,
    whose queries find k keys; None: none are surveyed. layers: also survey whole layers with sink logits. on_progress:
    counts layers of texts."""
    rings, grid = rings or [], grid or default_grid(texts.context - sink_tokens)
    generator = torch.Generator().manual_seed(seed)
    totals: list[Tensor] = []
    layered = LayerPrices(grid) if layers else None
    seen: list[tuple[Tensor, Tensor, Tensor, float | None, Tensor, Tensor, int | None]] = []

    def watch(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask, scaling: float | None = None, **others):
        if NAME not in module._modules:
            raise ValueError(f"{type(module).__name__} has no spans; attach them to the model before surveying it")
        if others.get("s_aux") is not None:
            raise ValueError(
                f"{type(module).__name__} has learned sink logits (s_aux), which are not surveyed; learn its spans "
                "in a loop "
                "of your own with spanformer.hf.attach"
            )
        spans = unwrap(module._modules[NAME])
        assert isinstance(spans, HeadSpans)
        own = spans.window
        full = attend(q, k, v, Rule(q.shape[1], reach=own), scale=scaling)
        out = full.out if full.out.requires_grad else full.out.requires_grad_()
        seen.append((q.detach(), k.detach(), v.detach(), scaling, out, full.lse.detach(), own))
        return out.transpose(1, 2), None

    with attention_replaced(model, IMPLEMENTATION, watch):
        for number, row in enumerate(texts.ids):
            seen.clear()
            grads = _drawn_gradients(model, row, texts.start, drawings, generator, seen)
            tables = []
            for n, layer in enumerate(seen):
                slopes = [g[n] for g in grads]
                priced = _price(layer, slopes, grid, sink_tokens, texts.start)
                tables.append((*priced, _price_rings(layer, slopes, rings, sink_tokens, k)))
                if layered is not None:
                    layered.add(n, *layer[:4], layer[4].detach(), layer[5], slopes)
                if on_progress:
                    on_progress(number * len(seen) + n + 1, len(texts) * len(seen))
            found = [torch.stack(each) for each in zip(*tables, strict=True)]
            totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found
    costs, lost, retrieved = totals
    each = len(texts) * texts.targets
    return Survey(
        grid, costs / each, lost / len(texts), rings, retrieved / each if rings else None,
        None if layered is None else layered.costs(each),
    )  # fmt: skip


def _drawn_gradients(model, row: Tensor, start: int, drawings: int, generator, seen: list) -> list[tuple[Tensor, ...]]:
    """For each drawing, ∂ Σ_t −log p(y_t) / ∂ output of every layer, each [1, H, T, D]."""
    with torch.enable_grad():
        logits = logits_of(model, hidden_states(model, row[None], start))[0]
    shares = logits.detach().softmax(-1)
    outputs, grads = [layer[4] for layer in seen], []
    for left in range(drawings - 1, -1, -1):
        drawn = torch.multinomial(shares, 1, generator=generator)[:, 0]
        loss = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        grads.append(torch.autograd.grad(loss, outputs, retain_graph=left > 0))
    return grads


@torch.no_grad()
def _price(layer, grads: list[Tensor], grid: list[int], sink_tokens: int, start: int) -> tuple[Tensor, Tensor]:
    """(½ Σ_blocks (g · δ)² averaged over drawings, attention lost), each [Hkv, G]."""
    q, k, v, scaling, full, lse, own = layer
    heads, groups = q.shape[1], k.shape[1]
    costs, lost = torch.zeros(groups, len(grid)), torch.zeros(groups, len(grid))
    for n, window in enumerate(grid):
        if own is not None and window >= own:  # such a window hides nothing more
            continue
        cut = attend(q, k, v, Rule(heads, reach=window, sink_tokens=sink_tokens if own is None else 0), scale=scaling)
        costs[:, n] = _divergence(cut.out - full.detach(), grads, groups)
        inside = (cut.lse - lse).exp()[0, :, start - 1 : -1].mean(1)
        lost[:, n] = (1 - inside).clamp(min=0).view(groups, -1).mean(1)
    return costs, lost


@torch.no_grad()
def _price_rings(layer, grads: list[Tensor], rings: list[int], sink_tokens: int, most: int) -> Tensor:
    """[Hkv, R] the same costs if every head retrieves."""
    q, k, v, scaling, full, _, own = layer
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    costs = torch.full((groups, len(rings)), math.inf)
    if own is not None:
        return costs
    scale = 1 / math.sqrt(q.shape[3]) if scaling is None else scaling
    for n, ring in enumerate(rings):
        near = attend(q, k, v, Rule(q.shape[1], reach=ring, sink_tokens=sink_tokens), scale=scaling)
        outs = []
        for g in range(groups):
            some = slice(g * shared, (g + 1) * shared)
            mine = Attended(near.out[:, some], near.lse[:, some])
            outs.append(read_older(q[:, some], k[:, g], v[:, g], mine, ring, sink_tokens, most, scale)[0])
        costs[:, n] = _divergence(torch.cat(outs, 1) - full.detach(), grads, groups)
    return costs


def _divergence(change: Tensor, grads: list[Tensor], groups: int) -> Tensor:
    """[Hkv] ½ Σ_blocks (g · δ)² averaged over drawings, for a change δ of the outputs [1, H, T, D]."""
    _, heads, length, _ = change.shape
    found = torch.zeros(groups)
    for g in grads:
        moved = (change.float() * g).sum(-1)[0].view(groups, heads // groups, length).sum(1)  # [Hkv, T]
        found += block_squares(moved) / (2 * len(grads))
    return found
