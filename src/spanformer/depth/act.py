"""Adaptive computation time: each token decides after every step whether it has pondered enough.

Adaptive Computation Time for Recurrent Neural Networks (Graves, 2016), https://arxiv.org/abs/1603.08983
Universal Transformers (Dehghani et al., 2018), §2.2. https://arxiv.org/abs/1807.03819

    h^n = σ(w · s^n + b)                    s^n: the token's state after step n
    N   = the first n with h^1 + … + h^n ≥ 1 − ε, at most M
    R   = 1 − (h^1 + … + h^(N−1))           p^n = h^n for n < N, p^N = R
    output = Σ p^n s^n                      ponder time ρ = N + R, loss += cost · mean(ρ)

The weights p sum to 1, at the last step too. A halted token keeps s^N, and later steps skip its work. N has no
gradient, so dρ/dh^n is −1 for n < N and 0 for n = N. The bias starts at −3, so that training starts deep: from 0 or 1
most runs stop at two steps and never leave them. tensor2tensor's form, `blend`, is output ← p^n s^n + (1 − p^n) output.

Shapes: B batch, T tokens, N tokens that still run, dim of hidden states.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from spanformer.depth.base import Depth, all_tokens, replace_rows
from spanformer.depth.confidence import Predict

Form = Literal["sum", "blend"]


class ACT(Depth):
    """The halting probability, shared by all steps. `latest` holds the steps of each token of the last pass."""

    updates: Tensor

    def __init__(
        self, dim: int, steps: int, *, epsilon: float = 0.01, bias: float = -3.0, cost: float = 0.01, warmup: int = 0,
        form: Form = "sum",
    ) -> None:  # fmt: skip
        """steps: the most that a token takes. cost: weight of the ponder time in the loss, which grows from 0 over the
        first `warmup` updates."""
        super().__init__()
        self.steps, self.epsilon, self.cost, self.warmup, self.form = steps, epsilon, cost, warmup, form
        self.score = nn.Linear(dim, 1)
        nn.init.constant_(self.score.bias, bias)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def start(self, x: Tensor, padding: Tensor | None = None, predict: Predict | None = None) -> Pondering:
        """A pass of the tokens x [B, T, dim]. padding [B, ≥ T] bool, aligned at the end. predict: not used."""
        return Pondering(self, x, padding)

    def probability(self, states: Tensor) -> Tensor:
        """states [N, dim] → h [N] in float32 or wider: sums of small probabilities are compared with 1 − ε."""
        wide = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            score = states.to(wide) @ self.score.weight[0].to(wide) + self.score.bias[0].to(wide)
        return score.sigmoid()

    def weight(self) -> Tensor:
        """The weight of the ponder time now."""
        if not self.warmup:
            return torch.full((), self.cost, device=self.updates.device)
        return self.cost * (self.updates / self.warmup).clamp(max=1)

    def after_step(self) -> None:
        """Call it after every optimiser step."""
        self.updates += 1

    def extra_repr(self) -> str:
        return f"steps={self.steps}, epsilon={self.epsilon:g}, cost={self.cost:g}, form={self.form}"


class Pondering:
    """One pass; see `DepthRun`."""

    def __init__(self, act: ACT, x: Tensor, padding: Tensor | None) -> None:
        self.act, self.index = act, all_tokens(x, padding)
        self.tokens, count, shape = len(self.index), x.shape[0] * x.shape[1], x.shape[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        self.sums = torch.zeros(count, dtype=wide, device=x.device)
        """[B · T] Σ h so far"""
        self.ponder = torch.zeros(count, dtype=wide, device=x.device)
        """[B · T] ρ of halted tokens"""
        self.taken = torch.zeros(count, dtype=torch.int64, device=x.device)
        self.out = torch.zeros(x.shape, dtype=wide, device=x.device)
        self.all, self.shape = count, shape

    def active(self) -> Tensor | None:
        return None if len(self.index) == self.all else self.index

    def after(self, layer: int, before: Tensor, x: Tensor) -> Tensor:
        now = self.index
        if not len(now):
            return before
        rows = x.flatten(0, 1).index_select(0, now)
        h, sums = self.act.probability(rows), self.sums.index_select(0, now)
        ends = sums + h >= 1 - self.act.epsilon
        if layer + 1 >= self.act.steps:
            ends = torch.ones_like(ends)
        p = torch.where(ends, 1 - sums, h)
        self._add(now, rows, p)
        self.sums = self.sums.index_copy(0, now, sums + h)
        self.ponder = self.ponder.index_copy(0, now, torch.where(ends, layer + 1 + 1 - sums, 0))
        self.taken[now] = layer + 1
        self.index = now[~ends]
        return replace_rows(before, now, rows)

    def _add(self, now: Tensor, rows: Tensor, p: Tensor) -> None:
        weighted = p[:, None] * rows
        if self.act.form == "blend":
            weighted = weighted + (1 - p)[:, None] * self.out.flatten(0, 1).index_select(0, now)
            self.out = replace_rows(self.out, now, weighted)
        else:
            self.out = self.out.flatten(0, 1).index_add(0, now, weighted).view(self.out.shape)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.act.note(self.taken.view(self.shape))
        return self.out.to(x.dtype), self.act.weight() * self.ponder.sum() / max(1, self.tokens)
