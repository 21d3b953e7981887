"""Longformer: The Long-Document Transformer (Beltagy, Peters, Cohan, 2020). https://arxiv.org/abs/2004.05150

    i not global:   a_ij ∝ exp(q_i·k_j / √D)        for |i − j| ≤ w/2 (in steps of the head's dilation), and j global
    i global:       a_ij ∝ exp(q^g_i·k^g_j / √D)    for all j, mixing v^g

q^g, k^g, v^g are separate projections. With causal=True neither sees the future, and the window is the last w
tokens, itself included. A global key inside the window counts once.

Shapes: B batch, H heads, Hkv key/value heads, Tq queries, Tk keys, N global tokens, D head size.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, RuleNeeds, View, key_states, one_rule, own_output
from spanformer.attention.global_tokens import GlobalTokens, check_mask, choose, fixed
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, Rule, attend, merge
from spanformer.ops.rule import UNLIMITED

TABLES = ("distance_bias", "distance_vec", "distance_value", "distance_scale")
"""terms of a rule that depend on distance"""
MOST_GLOBAL = 1 << 16


class Longformer(Attention):
    """`positions` are global in every example; or each example marks its own in `view.global_attention_mask`, at most
    `most` of them (a number the host knows, so that no device sync is needed). `farthest`: how many tokens
    back, or to either side, global attention reaches; default: all. A language model needs a limit for its memory.
    `dilation`: one for all heads, or [heads]; a window of w then spans about w · dilation tokens."""

    def __init__(
        self,
        dim: int,
        heads: int,
        window: int,
        *,
        positions: Sequence[int] = (),
        most: int = 0,
        farthest: int | None = None,
        dilation: int | Sequence[int] = 1,
        causal: bool = True,
        kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if dim < 1 or heads < 1 or dim % heads:
            raise ValueError(f"dim is {dim}; expected a multiple of heads, {heads}")
        kv_heads = kv_heads or heads
        if heads % kv_heads:
            raise ValueError(f"kv_heads is {kv_heads}; expected a divisor of heads, {heads}")
        if window < 1 or (window % 2 and not causal):
            both = "" if causal else ", an even number: half of it on each side"
            raise ValueError(f"window is {window}; expected at least 1 token{both}")
        if len(positions) > MOST_GLOBAL:
            raise ValueError(f"positions has {len(positions):,} global tokens; expected at most {MOST_GLOBAL:,}")
        if len(set(positions)) < len(positions) or any(p < 0 for p in positions):
            raise ValueError(f"positions is {list(positions)}; expected different positions of at least 0")
        if most < 0:
            raise ValueError(f"most is {most}; expected the largest number of global tokens in an example, at least 0")
        dilations = [dilation] * heads if isinstance(dilation, int) else list(dilation)
        if len(dilations) != heads or min(dilations) < 1:
            raise ValueError(f"dilation is {dilation}; expected at least 1, for all heads or for each of {heads}")
        steps = window - 1 if causal else window // 2
        if farthest is not None and farthest <= steps * max(dilations):
            raise ValueError(f"farthest is {farthest}; expected more than the window's {steps * max(dilations)} tokens")
        self.dim, self.heads, self.kv_heads, self.window, self.causal = dim, heads, kv_heads, window, causal
        self.positions, self.most, self.farthest = sorted(positions), most, farthest
        self.dilations, self.steps = dilations, steps
        self.has_globals = bool(positions or most)
        if self.has_globals:
            self.query = nn.Linear(dim, dim, bias=False)
            self.key = nn.Linear(dim, kv_heads * dim // heads, bias=False)
            self.value = nn.Linear(dim, kv_heads * dim // heads, bias=False)

    @classmethod
    def build(cls, spec: HeadSpec) -> Longformer:
        """The text's first tokens are global."""
        window, dilation, first = spec.p.window, spec.p.dilation, spec.p.globals
        return cls(
            spec.heads * spec.head_dim, spec.heads, window, positions=range(first), most=first, dilation=dilation,
            farthest=max(spec.section.max_span, window * dilation), causal=spec.causal, kv_heads=spec.kv_heads,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if not self.has_globals:
            return []
        reasons = own_output(self, cache=cache, mixed=mixed)
        if persistent:
            reasons.append(
                "model.persistent is set, and global tokens of longformer have separate queries; set persistent to 0"
            )
        return reasons

    def rule_needs(self) -> RuleNeeds:
        if self.has_globals:
            return "states"
        # a KV cache takes strides only with keys in order
        return "positions" if max(self.dilations) > 1 else "nothing"

    def rule(self, view: View | None = None) -> Rule:
        """The rule of the window; `forward` adds global tokens."""
        reach = [self.steps * dilation + 1 for dilation in self.dilations]
        return Rule(self.heads, causal=self.causal, reach=reach, stride=self.dilations)

    def context_length(self) -> list[int]:
        if self.has_globals:
            return [(self.farthest or UNLIMITED) - 1] * self.heads
        return [self.steps * dilation for dilation in self.dilations]

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        """Start the global projections as copies of the layer's, as the paper's code does, and of the same class."""
        if self.has_globals:
            self.query, self.key, self.value = (copy.deepcopy(linear) for linear in (query, key, value))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        rule = one_rule(rule, "Longformer") + view.rule(rule.heads, causal=rule.causal)
        keys, queries = self._global_tokens(view, q.shape[2], k)
        if keys is None or queries is None:
            return self._attend(q, k, v, rule, view.q_positions, view.k_positions)
        found = merge([self._window(q, k, v, rule, view, keys), self._to_global(q, k, v, rule, view, keys)])
        if not queries.index.shape[1]:
            return found
        rows = self._from_global(q.shape[2], k, rule, view, queries)
        return Attended(
            queries.put(found.out, rows.out.to(found.out.dtype)),
            queries.put(found.lse[..., None], rows.lse[..., None]).squeeze(-1),
        )

    def _window(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View, keys: GlobalTokens) -> Attended:
        """Attention over the window without the global keys."""
        hidden = torch.zeros(len(keys.index), k.shape[2], device=k.device)
        hidden = hidden.scatter(1, keys.index, torch.where(keys.there, -math.inf, 0.0))
        rule = rule + Rule(rule.heads, causal=False, key_bias=hidden[:, None])
        return self._attend(q, k, v, rule, view.q_positions, view.k_positions)

    def _to_global(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View, keys: GlobalTokens) -> Attended:
        """[B, H, Tq, ·] attention over the global keys only, at any distance."""
        q_positions, k_positions = _positions(view, q.shape[2], k.shape[2], k.device)
        bias = torch.where(keys.there, 0.0, -math.inf)[:, None]  # [1 or B, 1, N]
        if rule.key_bias is not None:
            rows = max(len(rule.key_bias), len(bias))
            index = keys.index[:, None].expand(rows, rule.key_bias.shape[1], -1)
            bias = bias + rule.key_bias.expand(rows, -1, -1).gather(2, index)
        documents, anywhere = _documents(rule, q.shape[2]), self._anywhere(rule, view, k.shape[2])
        few = replace(
            rule,
            reach=None if anywhere else self.farthest,
            stride=1,
            sink_logits=None,  # the window counts it
            key_bias=bias,
            documents=None if documents is None else (documents[0], keys.ids(documents[1])),
        )
        places = (None, None) if anywhere else (q_positions, keys.ids(k_positions))
        return self._attend(q, keys.take(k), keys.take(v), few, *places)

    def _from_global(self, tq: int, k: Tensor, rule: Rule, view: View, queries: GlobalTokens) -> Attended:
        """[B, H, N, ·] attention of the global queries over all keys, with separate projections."""
        x, tk = key_states(view, self.dim), k.shape[2]
        if x.shape[1] != tk:
            raise ValueError(
                f"view.keys has shape {list(x.shape)}; Longformer's global tokens have separate projections and "
                f"need the hidden states [B, {tk}, {self.dim}] of all keys"
            )
        end = tk
        if rule.causal and queries.last is not None and view.k_positions is None:
            end = queries.last + tk - tq + 1  # global queries see no later tokens, so do not project those
        at = queries.index + (tk - tq)
        tokens = x.gather(1, at[..., None].expand(len(x), -1, x.shape[2]))
        q, k, v = self._project(tokens, x[:, :end])
        q_positions, k_positions = _positions(view, tq, tk, k.device)
        q_positions, k_positions = queries.ids(q_positions), k_positions[:, :end]
        documents, anywhere = _documents(rule, tq), self._anywhere(rule, view, tk)
        free = replace(
            rule,
            reach=None if anywhere else self.farthest,
            stride=1,
            key_bias=None if rule.key_bias is None else rule.key_bias[..., :end],
            documents=None if documents is None else (queries.ids(documents[0]), documents[1][:, :end]),
        )
        if view.encode is not None:
            q, k = view.encode(q, k, replace(view, q_positions=q_positions, k_positions=k_positions))
        return self._attend(q, k, v, free, *((None, None) if anywhere else (q_positions, k_positions)))

    def _anywhere(self, rule: Rule, view: View, length: int) -> bool:
        """Whether global attention is independent of positions: then none are passed, which is
        faster."""
        within = self.farthest is None or (view.k_positions is None and length <= self.farthest)
        return within and not rule.causal and not any(getattr(rule, name) is not None for name in TABLES)

    def _project(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, N, D] of the global tokens [B, N, dim], k and v [B, Hkv, T, D] of the states they attend to, [B, T,
        dim]."""
        return (
            _split_heads(self.query(tokens), self.heads),
            _split_heads(self.key(x), self.kv_heads),
            _split_heads(self.value(x), self.kv_heads),
        )

    def _attend(self, q, k, v, rule: Rule, q_positions: Tensor | None, k_positions: Tensor | None) -> Attended:
        dropout = self.dropout if self.training else 0.0
        return attend(
            q, k, v, rule, backend=self.backend, dropout=dropout, q_positions=q_positions, k_positions=k_positions
        )  # fmt: skip

    def _global_tokens(self, view: View, tq: int, k: Tensor) -> tuple[GlobalTokens | None, GlobalTokens | None]:
        """The global tokens among the keys, and among the queries; None if there are none."""
        tk = k.shape[2]
        if view.global_attention_mask is not None:
            check_mask(view.global_attention_mask, self.most, k)
            return choose(view.global_attention_mask, self.most), choose(
                view.global_attention_mask[:, tk - tq :], self.most
            )
        there = [p - view.start for p in self.positions if view.start <= p < view.start + tk]
        if not there:
            return None, None
        return fixed(there, k), fixed([p - (tk - tq) for p in there if p >= tk - tq], k)

    def extra_repr(self) -> str:
        shown = f", positions={self.positions}" if self.positions else ""
        shown += f", most={self.most}" if self.most else ""
        shown += f", dilation={self.dilations}" if max(self.dilations) > 1 else ""
        return f"dim={self.dim}, heads={self.heads}, window={self.window}{shown}, causal={self.causal}"


def growing_windows(layers: int, lowest: int, highest: int) -> list[int]:
    """[layers] even window sizes from `lowest` in the first layer to `highest` in the last, growing by a constant
    factor. As in the paper: small windows for local detail in low layers, larger ones above."""
    if layers < 1 or lowest < 2 or highest < lowest or lowest % 2 or highest % 2:
        raise ValueError(
            f"layers is {layers}, lowest {lowest} and highest {highest}; expected at least 1 layer and even windows, "
            "2 ≤ lowest ≤ highest"
        )
    if layers == 1:
        return [highest]
    sizes = (lowest * (highest / lowest) ** (n / (layers - 1)) for n in range(layers))
    return [2 * round(size / 2) for size in sizes]


def _positions(view: View, tq: int, tk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1 or B, Tq] and [1 or B, Tk], made explicit."""
    if view.q_positions is not None and view.k_positions is not None:
        return torch.atleast_2d(view.q_positions), torch.atleast_2d(view.k_positions)
    keys = torch.arange(tk, device=device)[None]
    return keys[:, tk - tq :], keys


def _documents(rule: Rule, tq: int) -> tuple[Tensor, Tensor] | None:
    """[1 or B, Tq] and [1 or B, Tk], the ids of queries and of keys."""
    if rule.documents is None:
        return None
    if isinstance(rule.documents, tuple):
        return torch.atleast_2d(rule.documents[0]), torch.atleast_2d(rule.documents[1])
    keys = torch.atleast_2d(rule.documents)
    return keys[:, keys.shape[1] - tq :], keys


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · D] → [B, heads, T, D]"""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)
