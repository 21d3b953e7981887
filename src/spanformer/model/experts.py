"""Switch Transformers (Fedus, Zoph, Shazeer, 2021), https://arxiv.org/abs/2101.03961, for one expert per token, and
Mixtral of Experts (Jiang et al., 2024), https://arxiv.org/abs/2401.04088, for several.

    p = softmax(W_r x)        S = the k largest of p        y = Σ_{e ∈ S} g_e · FeedForward_e(x)
    k = 1:  g_e = p_e         k > 1:  g_e = p_e / Σ_{s ∈ S} p_s
    loss = balance · E · Σ_e f_e · P_e

f_e is the share of all assignments that fell to expert e (a count, without gradient), P_e the mean of p_e over tokens;
the loss is `balance` if all experts are used equally, and larger if not. With one expert per token g_e stays p_e:
renormalised it would be 1, and the router would get no gradient from the output.

Shapes: N tokens of the whole batch, E experts, k experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.model.feedforward import FeedForward, Kind


class Experts(nn.Module):
    """A mixture of feed-forwards. No token is dropped; each token costs its k experts.

    The host reads the number of tokens per expert once per call, which on a GPU is a sync.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        experts: int,
        per_token: int,
        kind: Kind,
        bias: bool,
        dropout: float,
        balance: float,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        if experts < 1:
            raise ValueError(f"experts is {experts}; expected at least 1")
        if not 1 <= per_token <= experts:
            raise ValueError(f"per_token is {per_token}; expected 1 … {experts}, the number of experts")
        if not balance >= 0:
            raise ValueError(
                f"balance is {balance}; expected at least 0 (a negative balance would reward unused experts)"
            )
        self.per_token, self.balance = per_token, balance
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(dim, hidden, kind=kind, bias=bias, dropout=dropout, chunk=chunk) for _ in range(experts)
        )

    @property
    def weights_per_token(self) -> int:
        """The number of weights used per token: the router's and those of k experts."""
        one = self.experts[0]
        assert isinstance(one, FeedForward)
        return self.router.weight.numel() + self.per_token * one.weights_per_token

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, dim] → (y [B, T, dim], the balancing loss, a scalar)."""
        tokens = x.flatten(0, -2)  # [N, dim]
        probability = self._route(tokens)  # [N, E]
        share, chosen = probability.topk(self.per_token, -1)  # [N, k] each
        if self.per_token > 1:
            share = share / share.sum(-1, keepdim=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts))  # [E]

        order = chosen.flatten().argsort(stable=True)  # the N·k assignments, sorted by expert
        token = order // self.per_token
        groups = tokens.index_select(0, token).split(counts.tolist())
        parts = [expert(group)[0] for expert, group in zip(self.experts, groups, strict=True)]
        y = torch.cat(parts)  # [N·k, dim]
        weighted = y * share.flatten().index_select(0, order)[:, None]
        mixed = weighted.new_zeros(len(tokens), y.shape[-1]).index_add(0, token, weighted).to(y.dtype)

        used = counts.to(probability.dtype) / len(order)
        loss = self.balance * len(self.experts) * (used * probability.mean(0)).sum()
        return mixed.view(*x.shape[:-1], y.shape[-1]), loss

    def _route(self, tokens: Tensor) -> Tensor:
        """[N, E], in float32 or wider even in autocast: small differences decide between experts."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)
