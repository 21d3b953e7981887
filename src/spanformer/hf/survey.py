"""What each key/value head would lose with a shorter window, measured for all heads and windows by a few passes over
text.

For head h and window w let δ be the change of the head's output when it sees w tokens and the sink_tokens instead of
all. Near the full model the predictions change by

    KL(full ‖ cut) ≈ ½ · δᵀ F δ        F = E_y[g gᵀ],   g = ∂ log p(y) / ∂ output,   y drawn from the full model itself

(F is the Fisher information), so one backward pass from drawn targets prices every head and window at once: the cost
is ½ E[(g · δ)²]. The mean of g is zero, so products of different queries cancel as far as their
effects on the predictions do not overlap; they are summed within blocks of queries and squared block by block.

The same passes measure the share of attention outside each window, which needs no gradients.

Shapes: L layers, H query heads, Hkv key/value heads, G windows tried, T tokens, D head size, Y drawings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanformer.core.progress import OnCount
from spanformer.hf.spans import NAME, HeadSpans, unwrap
from spanformer.hf.text import TextChunks, hidden_states, logits_of
from spanformer.hf.watch import attention_replaced
from spanformer.ops import Rule, attend

IMPLEMENTATION = "spanformer_survey"
BLOCK = 64
"""queries whose products with the gradient are summed before they are squared"""


@dataclass(frozen=True, eq=False)
class Survey:
    """Both tables are [L, Hkv, G]: for a head that keeps grid[g] tokens besides the sink_tokens, while all others keep
    everything. A layer with its own sliding window has no sink_tokens, and loses nothing at that window and beyond."""

    grid: list[int]
    costs: Tensor
    """KL from the full model, in nats per token"""
    lost: Tensor
    """share of the attention that falls outside, averaged over queries from `start` on and the heads of a group"""


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
    drawings: int = 4,
    seed: int = 0,
    on_progress: OnCount | None = None,
) -> Survey:
    """Survey a model with spans attached (their values are not used), one text at a time."""
    grid = grid or default_grid(texts.context - sink_tokens)
    generator = torch.Generator().manual_seed(seed)
    costs = lost = None
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
            tables = [
                _price(layer, [g[n] for g in grads], grid, sink_tokens, texts.start) for n, layer in enumerate(seen)
            ]
            c, m = (torch.stack(each) for each in zip(*tables, strict=True))
            costs = c if costs is None else costs + c
            lost = m if lost is None else lost + m
            if on_progress:
                on_progress(number + 1, len(texts))
    assert costs is not None and lost is not None
    return Survey(grid, costs / (len(texts) * texts.targets), lost / len(texts))


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
    heads, groups, length = q.shape[1], k.shape[1], q.shape[2]
    costs, lost = torch.zeros(groups, len(grid)), torch.zeros(groups, len(grid))
    pad = -length % BLOCK
    for n, window in enumerate(grid):
        if own is not None and window >= own:  # such a window hides nothing more
            continue
        cut = attend(q, k, v, Rule(heads, reach=window, sink_tokens=sink_tokens if own is None else 0), scale=scaling)
        change = (cut.out - full.detach()).float()
        for g in grads:
            moved = (change * g).sum(-1)[0].view(groups, heads // groups, length).sum(1)  # [Hkv, T]
            blocks = nn.functional.pad(moved, (0, pad)).view(groups, -1, BLOCK).sum(2)
            costs[:, n] += blocks.square().sum(1) / (2 * len(grads))
        inside = (cut.lse - lse).exp()[0, :, start - 1 : -1].mean(1)
        lost[:, n] = (1 - inside).clamp(min=0).view(groups, -1).mean(1)
    return costs, lost
