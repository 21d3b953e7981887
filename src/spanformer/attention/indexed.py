"""Learned sparse attention: an index chooses the keys of each query (DeepSeek-V3.2; DeepSeek-AI, 2025).
https://arxiv.org/abs/2512.02556

    I_ij = Σ_n w_in · relu(a_in·c_j) / √(J·E)        a, w, c = projections of the hidden states, n = 1 … J;
                                                         a and c in 8 bits
    S_i = the k keys of largest I_ij among those in reach, of equal ones the later        a_ij ∝ exp(s_ij), j ∈ S_i
    loss += β · mean_i KL(mean_h softmax_{S_i}(s_i) ‖ softmax_{S_i}(I_i)), with gradients to the index alone

All heads share S_i: keys are gathered once for all of them. A query ranks only keys that it may see, so later tokens
change nothing. `learned`: the number of keys is a budget z, a span in ranks: m(r) = clip((R + z − r) / R, 0, 1)
multiplies the weight of the key of rank r, and only ranks below z + R are gathered.
The paper teaches the index with full attention first; here it learns from what it chose, which for the first k tokens
of a text is everything. The paper's index knows positions; this one knows content, unless hidden states hold positions.
Shapes: B batch, H heads, T queries, N keys, D head size, J heads and E numbers of the index.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import (
    Attention,
    RuleNeeds,
    View,
    adds_rule,
    full_precision,
    given_terms,
    key_states,
    own_output,
    wide_linear,
)
from spanformer.core.recompute import to_be_recomputed
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.memory.key_ring import KeyRing, RingSizes
from spanformer.ops import AnyRule, Attended, Rule
from spanformer.ops.chosen import Index, Ranks, attend_chosen
from spanformer.ops.dropout import draw_seed
from spanformer.ops.index import LARGEST, Sight, choose_keys, coarse

TERMS = ("heads", "causal", "reach", "ramp")
"""of a rule; the view has documents and padding"""


class Indexed(Attention):
    """`keys`: k, or with `learned` the most that a budget may become, before the ramp. `kl`: β."""

    def __init__(
        self, heads: int, dim: int, keys: int, max_span: int, *, index_heads: int = 4, index_dim: int = 16,
        learned: bool = False, kl: float = 1.0, ramp: float = 32.0, init: float = 0.0, penalty: float = 2e-6,
        causal: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        sizes = {"heads": heads, "keys": keys, "max_span": max_span, "index_heads": index_heads, "index_dim": index_dim}
        for name, n in sizes.items():
            if n < 1:
                raise ValueError(f"{name} is {n}; expected at least 1")
        if index_dim > LARGEST:
            raise ValueError(f"index_dim is {index_dim}; expected at most {LARGEST}")
        if not 0 <= kl < math.inf:
            raise ValueError(f"kl is {kl}; expected 0 or more")
        self.heads, self.keys, self.max_span, self.kl, self.causal = heads, keys, max_span, kl, causal
        self.index_heads, self.index_dim = index_heads, index_dim
        self.index = nn.Parameter(torch.randn(index_heads * (index_dim + 1) + index_dim, dim) / math.sqrt(dim))
        """rows: a of every head, c, w"""
        self.index.requires_grad_(kl > 0)
        self.span: AdaptiveSpan | None = None
        """learned, in ranks, one for all heads"""
        if learned:
            self.span = AdaptiveSpan(heads, keys, ramp=ramp, init=init, penalty=penalty, kv_heads=1)
        self._loss: Tensor | None = None

    @classmethod
    def build(cls, spec: HeadSpec) -> Indexed:
        p, s = spec.p, spec.section
        return cls(
            spec.heads, spec.dim, p.keys, p.max_span, index_heads=p.index_heads, index_dim=p.index_dim,
            learned=p.learned, kl=p.kl, ramp=s.ramp, init=s.init, penalty=s.penalty, causal=spec.causal,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = [] if self.causal else own_output(self, cache=cache, mixed=mixed)
        if adds_rule(position):
            reasons.append(
                "Indexed gathers keys from anywhere in the text and has no terms by distance; use positions that are "
                "added to the embeddings (none, sinusoidal or learned) or rotary ones"
            )
        return reasons

    def rule_needs(self) -> RuleNeeds:
        return "states"

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=self.causal, reach=self.max_span)

    def context_length(self) -> list[int]:
        """No earlier hidden states if causal: `KeyRing` remembers what it needs."""
        return [0 if self.causal else self.max_span - 1] * self.heads

    def most(self) -> int:
        """How many keys a query takes at most now."""
        return self.keys if self.span is None else self.span.context_length()[0] + 1

    def mean_context(self) -> list[int]:
        return [min(self.most(), self.max_span)] * self.heads

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        return KeyRing(shape, RingSizes(self.max_span, self.index_dim)) if self.causal else None

    def codes(self, x: Tensor) -> Tensor:
        j, e = self.index_heads, self.index_dim
        return coarse(wide_linear(x.detach(), self.index[j * e : j * e + e]))

    def among(self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor, rule: AnyRule, view: View) -> Attended:
        if others := given_terms(rule, View(), TERMS):
            raise ValueError(f"{', '.join(others)} was given; Indexed has scores of chosen keys only; drop it")
        j, e = self.index_heads, self.index_dim
        states = key_states(View(x=view.x), self.index.shape[1]).detach()
        a = coarse(wide_linear(states, self.index[: j * e]).unflatten(2, (j, e)))
        w = wide_linear(states, self.index[j * e + e :]) / math.sqrt(j * e)
        teaches = self.kl > 0 and self.training and (torch.is_grad_enabled() or to_be_recomputed())
        dropout = self.dropout if self.training else 0.0
        ranks = None
        if self.span is not None and (span := self.span.rule().span) is not None:
            ranks = Ranks(span, self.span.ramp)
        with full_precision(q.device):
            chosen = choose_keys(a, codes, w, _sight(q, k, view, self.max_span, self.causal), self.most())
            found, kl = attend_chosen(
                q, k, v, chosen, ranks=ranks, index=Index(a, codes, w) if teaches else None, dropout=dropout,
                seed=draw_seed(None, q.device) if dropout else None,
            )  # fmt: skip
        self._loss = None if kl is None else self.kl * kl
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        return self.among(q, k, v, self.codes(key_states(view, self.index.shape[1])), rule, view)

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        spans = None if self.span is None else self.span.penalty()
        return self._loss if spans is None else spans if self._loss is None else spans + self._loss

    def spans(self) -> list[float | None]:
        return super().spans() if self.span is None else self.span.spans()

    def after_step(self) -> None:
        if self.span is not None:
            self.span.after_step()

    def advice(self) -> str | None:
        if self.keys < self.max_span:
            return None
        return (
            f"keys is {self.keys} and max_span {self.max_span}, so every query may take all keys, as full attention "
            "does for less; lower keys, or use full"
        )

    def extra_repr(self) -> str:
        more = "" if self.span is None else ", learned=True"
        return f"heads={self.heads}, keys={self.keys}, max_span={self.max_span}{more}"


def _sight(q: Tensor, k: Tensor, view: View, reach: int, causal: bool) -> Sight:
    tq, tk, at = q.shape[2], k.shape[2], view.q_positions
    keys = torch.arange(tk, device=q.device) if view.k_positions is None else view.k_positions
    queries = keys[tk - tq :] if at is None else at
    documents = view.documents
    if isinstance(documents, Tensor):
        documents = documents[:, tk - tq :], documents
    return Sight(
        queries.view(-1, tq), keys.view(-1, tk), reach, causal, at is None, documents, view.padding
    )  # fmt: skip
