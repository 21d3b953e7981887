"""What a KV cache in 8 or 4 bits costs in loss: a forward pass over whole texts that sees rounded keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from spanformer.hf.attention import HELD, IMPLEMENTATION, Seen, attend_spans
from spanformer.hf.spans import NAME, HeadSpans, unwrap
from spanformer.ops import attend, merge
from spanformer.ops.decode.codes import KEYS, RECENT, VALUES, check_bits, decode, encode


@contextmanager
def rounded_kv(bits: Literal[4, 8]) -> Iterator[None]:
    """Within it, models with spans attend to keys and values as a `SpanCache` of this many bits gives them when it
    reads a text token by token. For forward passes over whole texts, without padding and without a KV cache."""
    check_bits(bits)

    def attend_rounded(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Seen | Tensor | None,
        dropout: float = 0.0, scaling: float | None = None, s_aux: Tensor | None = None, **others: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if getattr(key, HELD, None) is not None:
            raise ValueError("rounded_kv is for forward passes without a KV cache; expected use_cache=False")
        k, v = _rounded(key, 8, KEYS), _rounded(value, 8, VALUES)
        if bits == 8:
            return attend_spans(module, query, k, v, attention_mask, dropout, scaling, s_aux, **others)
        spans = unwrap(module._modules.get(NAME))
        plain = not isinstance(attention_mask, Seen) or (attention_mask.bias, attention_mask.documents) == (None, None)
        if not isinstance(spans, HeadSpans) or not plain or spans.far is not None:
            raise ValueError("rounded_kv(4) takes spans without linear states, and texts without padding")
        positions = torch.arange(query.shape[2])[None] if spans.elastic() else None
        rule = spans.rule(positions=positions)
        first = torch.arange(query.shape[2], device=query.device) < rule.sink_tokens
        hidden = torch.zeros(1, 1, len(first), device=query.device).masked_fill(first, -torch.inf)
        near = replace(rule, reach=[min(n, RECENT) for n in rule.limits()], sink_tokens=0, key_bias=hidden)
        far = replace(rule, skip=RECENT, sink_logits=spans.sink_logits if s_aux is None else s_aux)
        older = attend(query, _rounded(key, 4, KEYS), _rounded(value, 4, VALUES), far, scale=scaling)
        return merge([attend(query, k, v, near, scale=scaling), older]).out.transpose(1, 2), None

    AttentionInterface.register(IMPLEMENTATION, attend_rounded)
    try:
        yield
    finally:
        AttentionInterface.register(IMPLEMENTATION, attend_spans)


def _rounded(x: Tensor, bits: Literal[4, 8], kind: int) -> Tensor:
    return decode(*encode(x, bits, kind), x.shape[3], kind).to(x.dtype)
