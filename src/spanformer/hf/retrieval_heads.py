"""Retrieval heads in a Hugging Face model with spans: some KV heads keep a short ring and find older tokens by search.

    retrieve(model, share=0.15, ring=64, k=64)       the KV heads with the longest spans retrieve
    model.generate(ids, past_key_values=RetrievalCache(model))

A query of such a head sees its ring (with whole weights, no ramp) and the sink tokens, and of all tokens before the
ring the k with the largest scores, under one softmax. The search is exact (ops/retrieve.py), the sets are disjoint, and
each query's certificate (attention/retrieval.py) bounds what it left out.
A cache holds 8-bit codes of the keys in RAM, and the keys and values themselves in RAM or in a file.

Shapes: B batch, H query heads, Hkv key/value heads, G retrieving ones, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from spanformer.hf.attach import base_of
from spanformer.hf.attention import HELD, Seen, attend_spans, make_mask
from spanformer.hf.spans import NAME, HeadSpans, head_spans, unwrap
from spanformer.ops import Attended, Rule, attend, merge

IMPLEMENTATION = "spanformer_retrieval"
CHUNK = 256
"""queries that search a whole text at a time"""
NO_EDGE = float(1 << 24)
"""a span beyond any text, exact in float32"""


@dataclass
class Retriever:
    """What a layer's spans have beside their windows."""

    heads: list[int]
    """key/value heads that retrieve"""
    k: int
    omitted: list[Tensor] | None = None
    """[B, query heads of these heads, T] certificates of every call; None: not collected"""
    before: list[float] = field(default_factory=list)
    """their spans before, as ratios"""


def retrieve(model: nn.Module, *, share: float = 0.15, ring: int = 64, k: int = 64) -> PreTrainedModel:
    """Let the KV heads with the longest spans retrieve: `share` of all heads, each with a ring of
    `ring` tokens."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; expected a share of the KV heads, above 0 and at most 1")
    if ring < 1 or k < 1:
        raise ValueError(f"ring is {ring} and k {k}; expected at least 1 token each")
    base, layers = base_of(model), list(head_spans(model).values())
    for layer in layers:
        if len(layer.ratio) != layer.groups:
            raise ValueError("spans are per query head; a ring belongs to a KV head: attach them with per='kv_head'")
        if layer.elastic() or any(layer.growths()):
            raise ValueError(
                "spans grow with the text or are unlimited; retrieval heads need fixed ones: fit with --retrieve, or "
                "set their growth to 0"
            )
        if retriever_of(layer) is not None:
            raise ValueError(f"{type(base).__name__} retrieves already; call stop_retrieving first")
    order = sorted(
        (
            (kept, n, g)
            for n, layer in enumerate(layers)
            if layer.window is None
            for g, kept in enumerate(layer.keeps())
        ),
        key=lambda each: (-each[0], each[1:]),
    )
    chosen = order[: max(1, round(share * sum(layer.groups for layer in layers)))]
    for n, layer in enumerate(layers):
        heads = sorted(g for _, at, g in chosen if at == n)
        if heads:
            before = layer.ratio[heads].tolist()
            with torch.no_grad():  # a head keeps ⌈z + R⌉ tokens, z = ratio · S
                layer.ratio[heads] = min(1.0, max(0.0, (ring - layer.ramp) / layer.max_span))
            layer.retriever = Retriever(heads, k, before=before)  # type: ignore[assignment]
    AttentionInterface.register(IMPLEMENTATION, attend_retrieving)
    AttentionMaskInterface.register(IMPLEMENTATION, make_mask)
    base.set_attn_implementation(IMPLEMENTATION)
    return model  # type: ignore[return-value]


def stop_retrieving(model: nn.Module) -> PreTrainedModel:
    """Undo `retrieve`: heads have the spans that they had."""
    base = base_of(model)
    for layer in head_spans(model).values():
        if (found := retriever_of(layer)) is not None:
            with torch.no_grad():
                layer.ratio[found.heads] = torch.tensor(found.before, dtype=layer.ratio.dtype)
            del layer.retriever
    base.set_attn_implementation("spanformer")
    return model  # type: ignore[return-value]


def retriever_of(spans: object) -> Retriever | None:
    return getattr(spans, "retriever", None)


def attend_retrieving(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Seen | Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, s_aux: Tensor | None = None, **others: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """As `attend_spans`; layers without retrieving heads, and those that a cache holds, go there."""
    spans = unwrap(module._modules.get(NAME))
    found = retriever_of(spans)
    if found is None or getattr(key, HELD, None) is not None:
        return attend_spans(module, query, key, value, attention_mask, dropout, scaling, s_aux, **others)
    assert isinstance(spans, HeadSpans)
    refuse(attention_mask, dropout, s_aux)
    return attend_text(query, key, value, spans, found, scaling).transpose(1, 2), None


def refuse(seen: Seen | Tensor | None, dropout: float, s_aux: Tensor | None) -> None:
    if isinstance(seen, Seen) and (seen.bias is not None or seen.documents is not None):
        raise ValueError("a text has padding or is packed with others; retrieval heads read one text per row, unpadded")
    if dropout or s_aux is not None:
        raise ValueError("retrieval heads support neither dropout nor learned sinks; stop_retrieving before training")


def ring_rule(rule: Rule, spans: HeadSpans, found: Retriever) -> Rule:
    """The rule with whole weights inside the rings of retrieving heads: no key on a ramp is retrieved."""
    if rule.span is None:
        return rule
    shared, keeps = spans.heads // spans.groups, spans.keeps()
    heads = [(h, keeps[g]) for g in found.heads for h in range(g * shared, (g + 1) * shared)]
    span, reach = rule.span.clone(), rule.reach_list()
    for h, ring in heads:
        span[h], reach[h] = NO_EDGE, min(reach[h], ring)
    return replace(rule, span=span, reach=reach)


def attend_text(
    q: Tensor, k: Tensor, v: Tensor, spans: HeadSpans, found: Retriever, scale: float | None
) -> Tensor:  # fmt: skip
    """[B, H, T, Dv] of a whole text: scores of retrieving heads with all older keys, some queries at a time."""
    near = attend(q, k, v, ring_rule(spans.rule_for(k.shape[2]), spans, found), scale=scale)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    shared, keeps, shares = q.shape[1] // k.shape[1], spans.keeps(), []
    out = near.out.clone()
    for g in found.heads:
        heads = slice(g * shared, (g + 1) * shared)
        mine = Attended(near.out[:, heads], near.lse[:, heads])
        merged, share = read_older(q[:, heads], k[:, g], v[:, g], mine, keeps[g], spans.sink_tokens, found.k, scale)
        out[:, heads] = merged
        shares.append(share)
    if found.omitted is not None:
        found.omitted.append(torch.cat(shares, 1))
    return out


def read_older(
    q: Tensor, k: Tensor, v: Tensor, near: Attended, ring: int, sinks: int, most: int, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One KV head: q [B, shared, T, D], k and v [B, T, D] → [B, shared, T, Dv] and certificates [B, shared, T]."""
    t, parts, shares = q.shape[2], [], []
    at = torch.arange(t, device=q.device)
    for n in range(0, t, CHUNK):
        some = slice(n, min(n + CHUNK, t))
        local = Attended(near.out[:, :, some], near.lse[:, :, some])
        last = some.stop - ring  # keys before it are older than the ring of some query
        if last <= sinks:
            parts.append(local.out)
            shares.append(torch.zeros_like(local.lse))
            continue
        hidden = at[sinks:last][None] > (at[some] - ring)[:, None]
        s = (q[:, :, some] @ k[:, None, sinks:last].mT * scale).masked_fill(hidden, -math.inf)
        best = s.topk(min(most, last - sinks), dim=3)
        lse = best.values.logsumexp(3)
        a = (best.values - torch.where(lse == -math.inf, 0, lse)[..., None]).exp()
        weights = torch.zeros_like(s).scatter(3, best.indices, a)
        merged = merge([local, Attended((weights @ v[:, None, sinks:last]).to(local.out.dtype), lse)])
        parts.append(merged.out)
        rest = ((~hidden).sum(1) - best.values.shape[3]).clamp(min=0).to(s.dtype).log() + best.values[..., -1]
        shares.append((rest.nan_to_num(-math.inf, neginf=-math.inf) - merged.lse).sigmoid())
    return torch.cat(parts, 2), torch.cat(shares, 2)
