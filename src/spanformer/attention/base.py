"""The base class of attention mechanisms: `rule` returns what each head may see, `forward` runs attention by it.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.ops import AnyRule, Attended, Rule, attend


@dataclass(frozen=True, eq=False)
class View:
    """Inputs that a mechanism may read besides queries, keys and values. Every field is optional."""

    x: Tensor | None = None
    """[B, Tq, dim] the hidden states from which the queries were projected."""
    q_positions: Tensor | None = None
    """[Tq] or [B, Tq] integers; given with k_positions. A slice of the keys keeps their positions."""
    k_positions: Tensor | None = None
    """[Tk] or [B, Tk] integers. Without positions, queries are the last Tq of the keys."""
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    """Integer ids as in `Rule.documents`: of the keys, or a pair (of the queries, of the keys)."""
    padding: Tensor | None = None
    """[B, Tk] bool, True where a key is padding: no query sees it."""
    start: int = 0
    """The position of the first key in the text: patterns may depend on positions, and memory drops old keys."""
    length: int | None = None
    """Tk, the number of keys; None: as many as queries."""
    keys: Tensor | None = None
    """[B, Tk, dim] the hidden states from which the keys were projected, for a mechanism whose rule needs them."""
    global_attention_mask: Tensor | None = None
    """[B, Tk] bool, True for the tokens of each example that see all others and are seen by them (Longformer)."""
    segments: Tensor | None = None
    """[B, n] integers, for a text after m global tokens (ETC): the global token of each of the last n keys; −1:
    none. Tk is m + n."""
    active: Tensor | None = None
    """[N] the tokens that the layer computes, as indices into B · Tq; None: all. It projects keys and values of all."""
    lazy: bool = False
    """Whether it projects keys and values only for rows of the batch that have an active token."""
    encode: Callable[[Tensor, Tensor, View], tuple[Tensor, Tensor]] | None = None
    """The layer's encoding of q and k, for a mechanism that has its own projections."""

    @property
    def nobody(self) -> bool:
        """Whether no token is active: a layer's memory only takes their keys and values."""
        return self.active is not None and not len(self.active)

    def stored(self, new: int) -> Tensor | None:
        """The tokens whose keys and values the layer projects, as `active`, where rows have `new` tokens each; None:
        all."""
        if not self.lazy or self.active is None:
            return None
        rows = (self.active // new).unique()
        return (rows[:, None] * new + torch.arange(new, device=rows.device)).flatten()

    def rule(self, heads: int, *, causal: bool = True) -> Rule:
        """The rule that hides other documents and padded keys."""
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


RuleNeeds = Literal["nothing", "positions", "states"]


class Choices(NamedTuple):
    """How queries chose their keys in the last training step, on average."""

    entropy: float
    """bits of a query's choice"""
    variance: float
    """of a query's score-function gradient with respect to its scores, at most; NaN without one"""


class Attention(nn.Module):
    """The base of every mechanism. Most override only `rule`; those that are not a masked softmax override
    `forward`."""

    heads: int

    def __init__(self) -> None:
        super().__init__()
        self.backend = "auto"
        """the backend that `forward` runs on, see `spanformer.attend`"""
        self.dropout = 0.0
        """dropout of attention weights, in training"""
        self.sink_tokens = 0
        """how many first tokens of the text all heads always see"""
        self.keys_are_queries = False
        """whether other tokens see a token's queries instead of its keys"""

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        """Why it cannot be combined with these, one sentence for each reason; [] if it can.

        position: an encoding; cache: decoding from a KV cache; mixed: heads of other kinds in the same layer;
        persistent: learned key/value vectors beside the text.
        """
        return []

    def rule_needs(self) -> RuleNeeds:
        """What `rule` depends on besides the queries: "nothing"; "positions" of the keys (view.start, view.length); or
        "states", the hidden states of the keys (view.keys). A rule that depends on the keys is computed for
        each range of keys, and is valid for that range only."""
        return "nothing"

    def rule(self, view: View) -> AnyRule:
        """The rule: what each head may see. A layer adds its position encoding's rule to this one before `forward`."""
        raise NotImplementedError(f"{type(self).__name__} has no rule; override rule or forward")

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        """A scalar to add to the loss, or None. rule: the result of `rule` for these queries; view: their view."""
        return None

    def context_length(self) -> list[int]:
        """[heads] how many earlier tokens each head can see now, which a layer must remember."""
        raise NotImplementedError(f"{type(self).__name__} has no context length; override context_length")

    def spans(self) -> list[float | None]:
        """[heads] the span in tokens that each head has learned; None for a head that learns none."""
        return [None] * self.heads

    def mean_context(self) -> list[int]:
        """[heads] how many distances each head sees now, its own token included; for dynamic spans, the average over
        the latest tokens."""
        return [n + 1 for n in self.context_length()]

    def map_queries(self, q: Tensor) -> Tensor:
        """q [B, H, Tq, D] → the queries that are multiplied with the keys. A layer calls this before its position
        encoding; `forward` receives the result."""
        return q

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv] → out [B, H, Tq, Dv] and lse [B, H, Tq].

        The view's documents and padding apply whether or not `rule` already has them.
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

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        """An empty memory, for a mechanism that does not store keys and values. None: training stores hidden
        states, and decoding keys and values."""
        return None

    def start_from(self, query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
        """A layer calls this with its initial projections; a mechanism with its own projections may copy them."""

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the mechanism's own loss (`penalty`) trains: training clips their gradients apart, so
        that neither loss scales the other's."""
        return []

    def advice(self) -> str | None:
        """What a user should know about how it trains, in a sentence; None while all is well."""
        return None

    def learn_from(self, nll: Tensor, weight: Tensor) -> None:
        """Called before the backward pass with the losses [B, T] and what each counts in the mean, for a mechanism that
        draws and learns by the loss itself."""

    def choices(self) -> Choices | None:
        """Of a mechanism that chooses keys: how it chose in the last step."""
        return None

    def after_step(self) -> None:
        """Called after every optimiser step, for example to clamp parameters."""


def remembers_itself(mechanism: Attention, *, decoding: bool = False) -> bool:
    """Whether a mechanism has its own memory, in training or in decoding."""
    shape = MemoryShape(batch=0, kv_heads=mechanism.heads, head_dim=1, in_place=decoding)
    return mechanism.new_memory(shape) is not None


def rotates(position: object) -> bool:
    """Whether an encoding changes queries and keys."""
    return getattr(position, "rotates", False) is True


def adds_rule(position: object) -> bool:
    """Whether an encoding adds terms over distances to a rule."""
    return getattr(position, "adds_rule", False) is True


def refused_distances(position: object, why: str) -> list[str]:
    """The reason why a mechanism cannot use an encoding over distances, if this is one. why: what its keys lack."""
    if not adds_rule(position):
        return []
    return [f"{type(position).__name__} depends on distances, and {why}; use absolute or rotary positions, or none"]


def own_output(mechanism: Attention, *, cache: bool, mixed: bool) -> list[str]:
    """Why a mechanism whose output is not a masked softmax by its rule has no KV cache and shares no layer."""
    name, why = type(mechanism).__name__, "its output does not follow from a rule alone"
    no_cache = f"{name} has no KV cache: {why}. Score the text by segments instead (lm(x, state))"
    not_mixed = f"{name} cannot share a layer with other kinds: {why}. Give it all heads of a layer"
    return [*([no_cache] if cache else []), *([not_mixed] if mixed else [])]


def one_rule(rule: AnyRule, name: str) -> Rule:
    """The rule of a mechanism that needs one rule for all its heads and pairs."""
    if not isinstance(rule, Rule):
        raise ValueError(f"{name} got a {type(rule).__name__}; expected one Rule for all heads and pairs")
    return rule


def given_terms(rule: AnyRule, view: View, beside: Collection[str]) -> list[str]:
    """The names of the terms that a rule and a view's documents set, except the terms `beside`."""
    if not isinstance(rule, Rule):
        return [type(rule).__name__]
    found = [f.name for f in fields(rule) if f.name not in beside and _given(getattr(rule, f.name), f.default)]
    return [*found, *(["documents"] if view.documents is not None and "documents" not in found else [])]


def _given(value: object, default: object) -> bool:
    return value is not None and (isinstance(value, Tensor) or value != default)


def key_states(view: View, dim: int) -> Tensor:
    """[B, Tk, dim], for a mechanism that reads the hidden states of its keys; without memory, the queries' states."""
    keys = view.x if view.keys is None else view.keys
    if keys is None:
        raise ValueError("view.keys is missing; expected the hidden states [B, Tk, dim] of the keys")
    if keys.ndim != 3 or keys.shape[2] != dim:
        raise ValueError(f"view.keys has shape {list(keys.shape)}; expected [B, Tk, {dim}]")
    return keys


def wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in float32 or wider, even in autocast: counts of tokens and sums over tokens need the precision."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    with full_precision(x.device):
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def full_precision(device: torch.device) -> AbstractContextManager:
    """A context without autocast."""
    at = device.type
    if torch.amp.is_autocast_available(at) and torch.is_autocast_enabled(at):
        return torch.autocast(at, enabled=False)
    return nullcontext()
