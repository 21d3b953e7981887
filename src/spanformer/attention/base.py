"""What an attention mechanism is: it says what each head may see (a Rule), and mixes values by it.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.ops import Attended, Rule, attend


@dataclass(frozen=True, eq=False)
class View:
    """What a mechanism may look at besides queries, keys and values. Every field is optional."""

    x: Tensor | None = None
    """[B, Tq, dim] the hidden states that the queries were made of."""
    q_positions: Tensor | None = None
    """[Tq] or [B, Tq] integers; given with k_positions. They travel with the keys, so trimming never shifts them."""
    k_positions: Tensor | None = None
    """[Tk] or [B, Tk] integers. Without positions, queries are the last Tq of the keys."""
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    """Integer ids as in `Rule.documents`: of the keys, or a pair (of the queries, of the keys)."""
    padding: Tensor | None = None
    """[B, Tk] bool, True where a key is padding: nothing sees it."""
    start: int = 0
    """Where in the text the first key stands: memory is trimmed, and a pattern may hold at certain places only."""
    length: int | None = None
    """Tk, how many keys there are; None: as many as queries."""
    keys: Tensor | None = None
    """[B, Tk, dim] the hidden states that the keys were made of, for a mechanism that `reads_keys`."""
    chosen: Tensor | None = None
    """[B, Tk] bool, True for the tokens of each example that see all others and are seen by them (Longformer)."""
    segments: Tensor | None = None
    """[B, n] integers, of a text behind m global tokens (ETC): which of those each of the last n keys belongs to; −1:
    none. Tk is m + n."""
    turn: Callable[[Tensor, Tensor, View], tuple[Tensor, Tensor]] | None = None
    """What the layer's position encoding did to q and k, for a mechanism that makes queries and keys of its own."""

    def rule(self, heads: int, *, causal: bool = True) -> Rule:
        """What the view itself hides: other documents and padded keys."""
        bias = None
        if self.padding is not None:
            if self.padding.dtype != torch.bool or self.padding.ndim != 2:
                raise ValueError(
                    f"view.padding has shape {list(self.padding.shape)} and dtype {self.padding.dtype}; "
                    "expected [B, Tk] of torch.bool, True where a key is padding"
                )
            shown = torch.zeros(self.padding.shape, device=self.padding.device)
            bias = shown.masked_fill(self.padding, -math.inf)[:, None]
        return Rule(heads, causal=causal, key_bias=bias, documents=self.documents)


class Attention(nn.Module):
    """The base of every mechanism. Most override only `rule`; those that are no masked softmax override `mix`."""

    backend: str = "auto"
    """which backend `mix` runs on, see `spanformer.attend`"""
    dropout: float = 0.0
    """of attention weights, while training"""
    turnable: bool = True
    """False if its scores would feel where turned queries and keys stand, and not only how far from each other"""
    heads: int
    kept: int = 0
    """how many first tokens of the text all heads go on seeing, see `Rule.kept`"""
    placed: bool = False
    """whether the rule depends on which keys there are: where they stand (view.start, view.length), or what they are
    (view.keys). It is then asked for with every stretch of keys, and holds for that one only."""
    reads_keys: bool = False
    """whether the rule is made of the keys' hidden states, view.keys; such a mechanism is `placed` too"""
    alone: bool = False
    """whether its rule does not say all that its heads see, or `mix` is no masked softmax over it, so that they cannot
    share a layer with other kinds, and a cache does not know them"""

    own_queries: bool = False
    """whether some tokens ask with queries that it makes itself, and not with the layer's"""

    def rule(self, view: View) -> Rule:
        """What each head may see. A layer adds its position encoding's rule to this one before mixing."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its heads see; override rule or mix")

    def lookback(self) -> list[int]:
        """[heads] how many earlier tokens each head can see now: what a layer must remember for it."""
        raise NotImplementedError(f"{type(self).__name__} does not say how far its heads look back")

    def learned(self) -> list[float | None]:
        """[heads] the span in tokens that each head has learned; None for one that learns none."""
        return [None] * self.heads

    def looked(self) -> list[int]:
        """[heads] how many distances each head looks at now, its own token among them; where tokens choose, the average
        over those last read."""
        return [n + 1 for n in self.lookback()]

    def map_queries(self, q: Tensor) -> Tensor:
        """q [B, H, Tq, D] → what is multiplied with the keys in their place. A layer does this with its queries before
        a position encoding turns them; `mix` is given what comes of it."""
        return q

    def mix(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, view: View) -> Attended:
        """q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] → out [B, H, Tq, Dv] and lse [B, H, Tq].

        The view's documents and padding hold whether or not `rule` already carries them.
        """
        return attend(
            q,
            k,
            v,
            rule + view.rule(rule.heads, causal=rule.causal),
            backend=self.backend,
            dropout=self.dropout if self.training else 0.0,
            q_positions=view.q_positions,
            k_positions=view.k_positions,
        )

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        """Called by a layer with its fresh projections: one with projections of its own may start as a copy of them."""

    def after_step(self) -> None:
        """Called after every optimiser step, e.g. to put parameters back into their range."""


def given_terms(rule: Rule, view: View, beside: Collection[str]) -> list[str]:
    """The names of what a rule says, and a view's documents, other than the terms `beside`."""
    found = [f.name for f in fields(rule) if f.name not in beside and _given(getattr(rule, f.name), f.default)]
    return [*found, *(["documents"] if view.documents is not None and "documents" not in found else [])]


def _given(value: object, default: object) -> bool:
    return value is not None and (isinstance(value, Tensor) or value != default)


def key_states(view: View, dim: int) -> Tensor:
    """[B, Tk, dim], for a mechanism that reads its keys' hidden states; by themselves, queries are the keys."""
    keys = view.x if view.keys is None else view.keys
    if keys is None:
        raise ValueError("view.keys is missing; expected the hidden states [B, Tk, dim] that the keys were made of")
    if keys.ndim != 3 or keys.shape[2] != dim:
        raise ValueError(f"view.keys has shape {list(keys.shape)}; expected [B, Tk, {dim}]")
    return keys


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """F.linear in float32 or wider, autocast or not: what is counted in tokens or summed over them needs the bits."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    at = x.device.type
    with torch.autocast(at, enabled=False) if torch.amp.is_autocast_available(at) else nullcontext():
        return F.linear(x.to(wide), weight.to(wide), bias.to(wide))
