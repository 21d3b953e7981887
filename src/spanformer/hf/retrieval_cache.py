"""A transformers KV cache for retrieval heads: rings as in a SpanCache, and a store of everything for some KV heads.

Row p of a store is token p after the sink tokens. A query at position i searches rows up to i − ring, so a store may
hold newer tokens, and a crop only lowers the count.

Shapes: B batch, G retrieving KV heads, M = B·G stores, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from spanformer.hf.attention import Seen
from spanformer.hf.cache import SpanCache, SpanLayer
from spanformer.hf.retrieval_heads import Retriever, attend_text, refuse, retriever_of, ring_rule
from spanformer.hf.spans import HeadSpans
from spanformer.ops import Attended, Rule, merge
from spanformer.ops.retrieve import attend_rows, find_rows
from spanformer.ops.search import Codes


class RetrievalCache(SpanCache):
    """For a model whose heads retrieve (`retrieve`). folder: keep keys and values of the stores in files there, which
    vanish with the cache; None: in RAM. Other arguments as in SpanCache."""

    def __init__(
        self, model: nn.Module, *, context: int = 0, slack: int = 0, bits: Literal[0, 8] = 0,
        folder: str | Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, context=context, slack=slack, bits=bits)
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, SpanLayer)
            found = retriever_of(layer.spans)
            if found is not None:
                self.layers[n] = RetrievalLayer(layer.spans, found, context, slack, bits, folder)


class RetrievalLayer(SpanLayer):
    def __init__(
        self, spans: HeadSpans, retriever: Retriever, context: int, slack: int, bits: Literal[0, 8],
        folder: str | Path | None,
    ) -> None:  # fmt: skip
        super().__init__(spans, context, slack, bits)
        self.retriever, self.folder = retriever, folder
        self.store: Store | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float | None, s_aux: Tensor | None) -> Tensor:
        refuse(seen, 0.0, s_aux)
        t, first = q.shape[2], self.rings is None
        if first and self.length != t:
            raise ValueError("a retrieval cache was given a text that it did not begin; make a new one for each text")
        rings, rule = self._rings(t), self.rule(s_aux)
        if first:
            self.dtype, self.store = k.dtype, Store(self.folder)
            out = attend_text(q, k, v, self.spans, self.retriever, scale)
            rings.append(k, v)
        else:
            near = rings.attend(q, k, v, rule, scale=scale)
        self.tokens.add(t, None)
        assert self.store is not None
        heads, sinks, before = self.retriever.heads, self.spans.sink_tokens, self.length - t
        new = slice(max(0, sinks - before), None)
        self.store.append(k[:, heads, new], v[:, heads, new])
        if first:
            return out
        return self._with_older(near, q, before, scale)

    def rule(self, s_aux: Tensor | None) -> Rule:
        soft = super().rule(s_aux)
        if self._ringed is None or self._ringed[0] is not soft:
            self._ringed = soft, ring_rule(soft, self.spans, self.retriever)
        return self._ringed[1]

    _ringed: tuple[Rule, Rule] | None = None

    def _with_older(self, near: Attended, q: Tensor, before: int, scale: float | None) -> Tensor:
        assert self.store is not None
        found, sinks, keeps = self.retriever, self.spans.sink_tokens, self.spans.keeps()
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        shared, out, shares = q.shape[1] // self.spans.groups, near.out.clone(), []
        for n, g in enumerate(found.heads):
            heads, each = slice(g * shared, (g + 1) * shared), []
            for t in range(q.shape[2]):
                mine = Attended(near.out[:, heads, t : t + 1], near.lse[:, heads, t : t + 1])
                count = before + t + 1 - keeps[g] - sinks
                mine, share = self.store.attend(q[:, heads, t : t + 1], n, count, mine, found.k, scale)
                out[:, heads, t : t + 1] = mine.out
                each.append(share)
            shares.append(torch.cat(each, 2))
        if found.omitted is not None:
            found.omitted.append(torch.cat(shares, 1))
        return out

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.store is not None:
            self.store.count = max(0, self.length - self.spans.sink_tokens)

    def reset(self) -> None:
        super().reset()
        self.store = None

    def bytes(self) -> int:
        """In RAM."""
        return super().bytes() + (0 if self.store is None else self.store.bytes())

    def _take_rows(self, index: Tensor) -> None:
        if self.store is not None:
            self.store.take_rows(index)
        super()._take_rows(index)


class Store:
    """Keys and values of some KV heads, in the order of their tokens; codes of the keys in RAM."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder, self.count = folder, 0
        self.codes: list[Codes] = []
        """one for each head"""
        self.keys: Tensor | None = None
        """[G, B, room, D]"""
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """[B, G, n, D] and [B, G, n, Dv]"""
        if not self.codes:
            self.codes = [Codes(k.shape[0], k.shape[3]) for _ in range(k.shape[1])]
        end = self.count + k.shape[2]
        self.keys, self.values = (self._room(old, new, end) for old, new in ((self.keys, k), (self.values, v)))
        self.keys[:, :, self.count : end] = k.transpose(0, 1)
        self.values[:, :, self.count : end] = v.transpose(0, 1)
        for g, codes in enumerate(self.codes):
            codes.crop(self.count)
            codes.append(k[:, g].detach())
        self.count = end

    def _room(self, old: Tensor | None, new: Tensor, end: int) -> Tensor:
        if old is not None and end <= old.shape[2]:
            return old
        size = (new.shape[1], new.shape[0], max(end, 256, 3 * self.count // 2), new.shape[3])
        if self.folder is None:
            made = new.new_empty(size)
        else:
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # the mapping outlives its name
                made = torch.from_file(file.name, shared=True, size=math.prod(size), dtype=new.dtype).view(size)
        if old is not None:
            made[:, :, : self.count] = old[:, :, : self.count]
        return made

    def attend(
        self, q: Tensor, head: int, count: int, near: Attended, k: int, scale: float
    ) -> tuple[Attended, Tensor]:  # fmt: skip
        """One query q [B, shared, 1, D] of each row over the first `count` rows of a head, joined with what its ring
        gave; certificates [B, shared, 1]."""
        if count <= 0:
            return near, torch.zeros_like(near.lse)
        assert self.keys is not None and self.values is not None
        codes, held = self.codes[head], self.codes[head].count
        codes.count = count
        try:
            ids = find_rows(codes, self.keys[head], q[:, :, 0], k)
        finally:
            codes.count = held
        found = attend_rows(q[:, :, 0], self.keys[head], self.values[head], ids, scale)
        merged = merge([near, Attended(found.out[:, :, None], found.lse[:, :, None])])
        rest = (
            math.log(max(0, count - k)) + found.lowest[:, :, None]
            if count > k
            else torch.full_like(near.lse, -math.inf)
        )
        return merged, (rest - merged.lse).sigmoid()

    def take_rows(self, index: Tensor) -> None:
        if self.folder is not None:
            raise ValueError("a store in files cannot copy rows, as beams do; use folder=None")
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[:, index], self.values[:, index]
        for codes in self.codes:
            codes.rows, codes.error, codes.longest = codes.rows[index], codes.error[index], codes.longest[index]
            assert codes.scales is not None
            codes.scales = codes.scales[index]

    def bytes(self) -> int:
        held = sum(codes.bytes() for codes in self.codes)
        if self.folder is None and self.keys is not None and self.values is not None:
            held += sum(t.numel() * t.element_size() for t in (self.keys, self.values))
        return held
