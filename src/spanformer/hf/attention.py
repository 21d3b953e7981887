"""The attention function and the mask function that transformers calls in a model with spans.

Both are registered under one name: with an attention function alone transformers makes no mask at all, and causality
would be lost silently. The mask function returns no L × L tensor but a `Seen`: the positions hidden besides the future,
as [B, Tk] tensors, made once per forward pass and shared by all layers.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D and Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from spanformer.hf.far import attend_beyond, far_of, refuse_far
from spanformer.hf.padding import pack_real
from spanformer.hf.spans import NAME, HeadSpans, unwrap
from spanformer.ops import attend

IMPLEMENTATION = "spanformer"
HELD = "held_by_spans"
"""attribute of keys that passed through a SpanCache: their layer of it"""


@dataclass(frozen=True, eq=False)
class Seen:
    """Positions that one forward pass hides besides the future, shared by layers."""

    keys: int
    """Tk"""
    window: int | None
    """the sliding window of the layers"""
    bias: Tensor | None = None
    """[B, 1, Tk] −inf at padding"""
    documents: Tensor | None = None
    """[B, Tk] ids of packed texts"""
    q_positions: Tensor | None = None
    """[1 or B, Tq] positions of queries in their text; None: the queries are the last tokens, without padding"""
    k_positions: Tensor | None = None
    """[1 or B, Tk]"""
    real: Tensor | None = None
    """[B, Tq] False where a new token is padding; None: no padding"""

    @cached_property
    def packed(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """For a KV cache, whose rows hold real tokens only: see `pack_real`. Computed once per forward pass, by the
        first layer that needs it."""
        return None if self.real is None else pack_real(self.real)

    def positions(self, query: Tensor) -> Tensor:
        """[B, Tq] of the queries [B, H, Tq, D] in their texts"""
        last = torch.arange(self.keys - query.shape[2], self.keys)[None]
        return (last if self.q_positions is None else self.q_positions).expand(len(query), -1)

    def contiguous(self) -> Seen:
        """Called by transformers on masks of a static cache only; its window may be as long as its text."""
        raise ValueError(_STATIC)


_STATIC = (
    "a static cache has room for every token of every head, which spans avoid; leave out cache_implementation, "
    "or pass past_key_values=spanformer.hf.SpanCache(model)"
)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_others: object,  # arguments for other implementations
) -> Seen:
    if use_vmap:
        raise ValueError(
            "this model makes its own mask (or_mask_function or and_mask_function), which spans "
            "cannot express; detach the spans for such inputs"
        )
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError(_STATIC)
    seen = Seen(kv_length, local_size)
    positions = torch.arange(kv_length, device=device)[None] + kv_offset
    if mask_function is not causal_mask_function:
        documents = _documents(mask_function, batch_size, q_length, kv_length, device)
        if documents is not None:
            starts = positions - _starts(documents)
            seen = Seen(kv_length, local_size, None, documents, starts[:, kv_length - q_length :], starts)
    if attention_mask is None:
        return seen
    shown = attention_mask[:, kv_offset : kv_offset + kv_length]
    if shown.device.type == "cpu" and bool(shown.all()):
        return seen
    bias = torch.zeros(shown.shape, device=device).masked_fill(~shown, -math.inf)[:, None]
    if local_size is None:  # padding has no position, so distances do not count it
        positions = attention_mask.long().cumsum(1)[:, kv_offset : kv_offset + kv_length] - 1
    else:  # the model's sliding window counts padding, as without spans
        positions = positions - attention_mask.int().argmax(1, keepdim=True)
    new = slice(kv_length - q_length, None)
    return replace(seen, bias=bias, q_positions=positions[:, new], k_positions=positions, real=shown[:, new])


def attend_spans(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Seen | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,  # arguments for other implementations
) -> tuple[Tensor, None]:
    """query [B, H, Tq, D], key [B, Hkv, Tk, D], value [B, Hkv, Tk, Dv] → [B, Tq, H, Dv]"""
    spans = module._modules.get(NAME)
    if type(spans) is not HeadSpans:
        spans = unwrap(spans)
        if not isinstance(spans, HeadSpans):
            raise ValueError(
                f"{type(module).__name__} has no spans, but its attention implementation is {IMPLEMENTATION!r}; call "
                "spanformer.hf.attach on the model, or load a folder with spans by spanformer.hf.from_pretrained "
                "(without its spans: attn_implementation='sdpa')"
            )
    seen = attention_mask
    if not isinstance(seen, Seen):
        seen = _without_mask(seen, query, key, spans)
    _refuse(others)
    if seen.window != spans.window:
        raise ValueError(
            f"this layer's sliding window is {seen.window}, and was {spans.window} when spans were "
            "attached; detach and attach again after changing the configuration"
        )
    if spans.sink_logits is not None:
        if s_aux is not None:
            raise ValueError(
                f"{type(module).__name__} has learned sink logits of its own (s_aux); attach spans without sink_logits"
            )
        s_aux = spans.sink_logits
    held = getattr(key, HELD, None)
    query, key, value = _as_autocast(query, key, value)
    if held is not None:
        out = held.attend(query, key, value, seen, scaling, s_aux)
    elif seen.keys != key.shape[2]:
        raise ValueError(
            f"there are {key.shape[2]} keys, and the mask was made for {seen.keys}; a cache whose layers "
            "hold different lengths cannot be used here; pass a spanformer.hf.SpanCache"
        )
    else:
        out = attend_seen(query, key, value, seen, spans, dropout, scaling, s_aux)
    return out.transpose(1, 2), None


def attend_seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    spans: HeadSpans,
    dropout: float,
    scaling: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """[B, H, Tq, Dv], with all visible keys given. s_aux [H]: learned sink logits (gpt-oss)."""
    positions = seen.positions(query) if spans.elastic() else None
    rule, far = spans.rule_for(seen.keys, positions), far_of(spans)
    if far is not None:
        refuse_far(dropout, s_aux)
    if seen.bias is not None or seen.documents is not None or s_aux is not None:
        documents = None
        if seen.documents is not None:
            documents = (seen.documents[:, seen.keys - query.shape[2] :], seen.documents)
        rule = replace(rule, key_bias=seen.bias, documents=documents, sink_logits=s_aux)
    placed = seen.documents is None or rule.sink_tokens  # packed texts need positions only to find their first tokens
    found = attend(
        query,
        key,
        value,
        rule,
        dropout=dropout,
        scale=scaling,
        q_positions=seen.q_positions if placed else None,
        k_positions=seen.k_positions if placed else None,
    )
    if far is None or rule.span is None:  # no key lies beyond a span
        return found.out
    return attend_beyond(far, spans, found, query, key, value, seen)


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype, as SDPA does: rotary positions leave queries and keys in float32 under autocast."""
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)


def register() -> None:
    """Register both functions with transformers; idempotent."""
    AttentionInterface.register(IMPLEMENTATION, attend_spans)
    AttentionMaskInterface.register(IMPLEMENTATION, make_mask)


def _documents(mask: Callable, batch: int, queries: int, keys: int, device: torch.device | str) -> Tensor | None:
    """[B, Tk] ids of the texts that transformers found packed in each row; None if every row is one.

    A mask function answers for any pair of positions: a text begins where a token does not see its left neighbour.
    """
    rows, at = torch.arange(batch, device=device)[:, None], torch.arange(keys, device=device)
    if keys < 2:
        return None
    before, after = at[None, :-1], at[None, 1:]
    if bool(mask(rows, rows[:1], before, after).any()):
        raise ValueError(
            "this model lets tokens see later ones, but spans are causal: it is an encoder, or makes its "
            "own mask for images; detach the spans for such inputs"
        )
    if queries != keys:  # transformers has no packed texts with a KV cache
        return None
    begins = ~mask(rows, rows[:1], after, before).expand(batch, keys - 1)
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.long().cumsum(1), (1, 0))


def _starts(documents: Tensor) -> Tensor:
    """[B, Tk] position at which each token's text begins."""
    at = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = nn.functional.pad(documents.diff(dim=1) != 0, (1, 0), value=True)
    return torch.where(begins, at, 0).cummax(1).values


def _without_mask(mask: Tensor | None, query: Tensor, key: Tensor, spans: HeadSpans) -> Seen:
    if mask is None and query.shape[2] <= key.shape[2]:
        return Seen(key.shape[2], spans.window)
    shape = "missing" if mask is None else f"a tensor of shape {list(mask.shape)}"
    raise ValueError(
        f"the attention mask is {shape}; with spans pass the model attention_mask [batch, tokens] or "
        "none, not a mask of four axes"
    )


def _refuse(others: dict[str, object]) -> None:
    """Raise for arguments of other implementations that would be ignored silently."""
    for name, why in _REFUSED.items():
        if others.get(name) not in (None, False):
            raise ValueError(f"{name} is {others[name]!r}; {why}")


_REFUSED = {
    "softcap": "spans do not support capped scores (Gemma 2); set config.attn_logit_softcapping = None to turn it off",
    "position_bias": "spans do not support a layer's own position bias; detach the spans for this model",
    "output_attentions": "attention with spans never computes all weights; detach the spans to get them",
}
