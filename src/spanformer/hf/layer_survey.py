"""What a whole layer would lose with a window, if each of its query heads had its best sink logit in place of sink
tokens: the form that other engines hold (granite.py).

Beyond a window w a query's keys have the weight exp(b), b = log(Σ exp(s_ij) over them). A head with the sink logit c
has the output of the window times sigmoid(lse − c), lse that of the window: with c = b for every query the keys inside
keep the weights of the full model. So c is sought beside the median of b: lower ones are tried, too, because
a sink logit also takes weight where the window hides nothing. All of them cost one attention a window.

Shapes: L layers, H query heads, G windows tried, S sink logits tried, T tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spanformer.hf.spans import NO_SINK
from spanformer.ops import Rule, attend

BLOCK = 64
"""queries whose products with the gradient are summed before they are squared"""
BESIDE = (0.5, 0.0, -0.5, -1.0, -2.0, -4.0)
"""sink logits tried, from the median of b"""


@dataclass(frozen=True, eq=False)
class LayerCosts:
    costs: Tensor
    """[L, G] KL from the full model, in nats per token, if the layer keeps grid[g] tokens"""
    sink_logits: Tensor
    """[L, H, G] those of its heads"""


class LayerPrices:
    """Sums costs over texts. The first text decides which sink logits are tried."""

    def __init__(self, grid: list[int]) -> None:
        self.grid = grid
        self.tried: list[Tensor] = []
        """of each layer [H, G, S]"""
        self.totals: list[Tensor] = []
        """of each layer [H, G, S]"""

    @torch.no_grad()
    def add(
        self, n: int, q: Tensor, k: Tensor, v: Tensor, scaling: float | None, full: Tensor, lse: Tensor,
        grads: list[Tensor],
    ) -> None:  # fmt: skip
        """One text's q [1, H, T, D], k and v of layer n; its output, lse and gradients by the output if all heads see
        everything."""
        tried, totals = [], []
        whole = [(g.float() * full.float()).sum(-1)[0] for g in grads]
        for at, window in enumerate(self.grid):
            near = attend(q, k, v, Rule(q.shape[1], reach=window), scale=scaling)
            inside = (near.lse - lse)[0].float().exp().clamp(max=1)
            beyond = lse[0].float() + torch.log1p(-inside)
            tried.append(self.tried[n][:, at] if n < len(self.tried) else logits_to_try(beyond[:, window:]))
            kept = torch.sigmoid(near.lse[0].float()[:, None] - tried[-1][..., None])  # [H, S, T]
            total = torch.zeros_like(tried[-1])
            for g, before in zip(grads, whole, strict=True):
                now = (g.float() * near.out.float()).sum(-1)[0]
                total += block_squares(kept * now[:, None] - before[:, None]) / (2 * len(grads))
            totals.append(total)
        if n == len(self.tried):
            self.tried.append(torch.stack(tried, 1))
            self.totals.append(torch.stack(totals, 1))
        else:
            self.totals[n] += torch.stack(totals, 1)

    def costs(self, targets: int) -> LayerCosts:
        """targets: how many there were in all texts."""
        totals, tried = torch.stack(self.totals), torch.stack(self.tried)
        least = totals.min(-1)
        chosen = tried.gather(-1, least.indices[..., None])[..., 0]
        return LayerCosts(least.values.sum(1) / targets, chosen)


def logits_to_try(beyond: Tensor) -> Tensor:
    """[H, S] for b [H, any], −∞ where nothing is hidden."""
    if not beyond.shape[1]:
        return torch.full((len(beyond), len(BESIDE)), NO_SINK)
    middle = beyond.nan_to_num(neginf=NO_SINK).median(1).values
    return (middle[:, None] + torch.tensor(BESIDE)).clamp(min=NO_SINK)


def block_squares(moved: Tensor) -> Tensor:
    """Σ over blocks of queries of the squared sums of moved [..., T]."""
    blocks = nn.functional.pad(moved, (0, -moved.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks.sum(-1).square().sum(-1)
