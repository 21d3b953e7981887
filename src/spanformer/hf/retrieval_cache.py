"""A transformers KV cache for retrieval heads: rings as in a SpanCache, and a store of everything for some KV heads.

Row p of a store is token p after the sink tokens. A query at position i searches rows up to i − ring, so a store may
hold newer tokens, and a crop only lowers the count. All retrieving heads of a layer have one ring, and are searched by
one call.

Shapes: B batch, G retrieving KV heads, M = B·G stores, S query heads of each, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from spanformer.hf.attention import Seen
from spanformer.hf.cache import SpanCache, SpanLayer
from spanformer.hf.retrieval_heads import Retriever, attend_text, refuse, retriever_of, ring_rule
from spanformer.hf.spans import HeadSpans
from spanformer.ops import Attended, Rule, merge
from spanformer.ops.decode.codes import Bits
from spanformer.ops.retrieve import attend_rows, find_rows
from spanformer.ops.retrieve_step import attend_step, kernel_serves
from spanformer.ops.search import Codes


class RetrievalCache(SpanCache):
    """For a model whose heads retrieve (`retrieve`). folder: keep keys and values of the stores in files there, which
    vanish with the cache; None: in RAM. codes: where their 8-bit codes lie, in RAM or in such files: every search reads
    all codes, so the system's page cache should have room for them. Other arguments as in SpanCache."""

    def __init__(
        self, model: nn.Module, *, context: int = 0, slack: int = 0, bits: Bits = 0,
        folder: str | Path | None = None, codes: Literal["ram", "file"] = "ram",
    ) -> None:  # fmt: skip
        super().__init__(model, context=context, slack=slack, bits=bits)
        if codes not in ("ram", "file") or (codes == "file" and folder is None):
            raise ValueError(
                f"codes is {codes!r} and folder {folder!r}; expected 'ram', or 'file' with a folder for the files"
            )
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(
                f"folder is {str(folder)!r}, which is no folder; create it, or pass None to keep stores in RAM"
            )
        make = partial(Store, folder, mapped=codes == "file")
        for n, layer in enumerate(self.layers):
            assert isinstance(layer, SpanLayer)
            found = retriever_of(layer.spans)
            if found is not None:
                self.layers[n] = RetrievalLayer(layer.spans, found, context, slack, bits, make)


class RetrievalLayer(SpanLayer):
    def __init__(
        self, spans: HeadSpans, retriever: Retriever, context: int, slack: int, bits: Bits,
        make: Callable[[], Store],
    ) -> None:  # fmt: skip
        super().__init__(spans, context, slack, bits)
        self.retriever, self.make = retriever, make
        shared = spans.heads // spans.groups
        self.queries = [h for g in retriever.heads for h in range(g * shared, (g + 1) * shared)]
        self.groups = torch.tensor(retriever.heads)
        self.store: Store | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float | None, s_aux: Tensor | None) -> Tensor:
        refuse(seen, 0.0, s_aux)
        t, first = q.shape[2], self.rings is None
        if first and self.length != t:
            raise ValueError("a retrieval cache was given a text that it did not begin; make a new one for each text")
        rings, rule, before = self._rings(t), self.rule(s_aux, t), self.length - t
        self.tokens.add(t, None)
        if first:
            self.dtype, self.store = k.dtype, self.make()
            out = attend_text(q, k, v, self.spans, self.retriever, scale)
            rings.append(k, v)
            self._append(k, v, 0)
            return out
        near, store = rings.attend(q, k, v, rule, scale=scale), self.store
        assert store is not None
        scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
        if t == 1 and before >= self.spans.sink_tokens and store.steps(q):
            found, share = store.step(q, (k, v), self.groups, self._older(before), near, self.retriever.k, scale)
            self._note(share)
            return found.out
        self._append(k, v, before)
        return self._with_older(near, q, before, scale)

    def _append(self, k: Tensor, v: Tensor, before: int) -> None:
        """To the store; sink tokens stay with the rings."""
        assert self.store is not None
        heads, new = self.retriever.heads, slice(max(0, self.spans.sink_tokens - before), None)
        self.store.append(k[:, heads, new], v[:, heads, new])

    def _older(self, at: int) -> int:
        """Rows of the store that the query at this position searches."""
        assert self.rings is not None
        return at + 1 - self.rings.reach[self.retriever.heads[0]] - self.spans.sink_tokens

    def _note(self, share: Tensor) -> None:
        if self.retriever.omitted is not None:
            self.retriever.omitted.append(share)

    def rule(self, s_aux: Tensor | None, new: int) -> Rule:
        soft = super().rule(s_aux, new)
        if self._ringed is None or self._ringed[0] is not soft:
            self._ringed = soft, ring_rule(soft, self.spans, self.retriever)
        return self._ringed[1]

    _ringed: tuple[Rule, Rule] | None = None

    def _with_older(self, near: Attended, q: Tensor, before: int, scale: float) -> Tensor:
        assert self.store is not None
        heads, shares, out = self.queries, [], near.out.clone()
        for t in range(q.shape[2]):
            mine = Attended(near.out[:, heads, t : t + 1], near.lse[:, heads, t : t + 1])
            mine, share = self.store.attend(q[:, heads, t], self._older(before + t), mine, self.retriever.k, scale)
            out[:, heads, t : t + 1] = mine.out
            shares.append(share)
        self._note(torch.cat(shares, 2))
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
    """Keys and values of some KV heads with codes of the keys, in the order of their tokens. folder: where files hold
    them; None: in RAM. mapped: whether codes lie there, too."""

    def __init__(self, folder: str | Path | None = None, *, mapped: bool = False) -> None:
        self.folder, self.mapped, self.count, self.heads = folder, mapped, 0, 0
        self.codes: Codes | None = None
        """of M stores"""
        self.keys: Tensor | None = None
        """[M, room, D]"""
        self.values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """[B, G, n, D] and [B, G, n, Dv]"""
        self.heads, end = k.shape[1], self.count + k.shape[2]
        k, v = k.detach().flatten(0, 1), v.detach().flatten(0, 1)
        codes, keys, values = self._reserve(k, v, end)
        keys[:, self.count : end], values[:, self.count : end] = k, v
        codes.append(k)
        self.count = end

    def _reserve(self, k: Tensor, v: Tensor, end: int) -> tuple[Codes, Tensor, Tensor]:
        """Codes, keys and values with room for `end` rows like k and v, and those that are in use."""
        self.keys, self.values = (self._room(old, new, end) for old, new in ((self.keys, k), (self.values, v)))
        if self.codes is None:
            self.codes = Codes(len(k), k.shape[2])
        codes = self.codes
        if self.mapped:
            assert codes.scales is not None
            codes.rows = self._room(codes.rows, codes.rows, end)
            codes.scales = self._room(codes.scales[..., None], codes.scales[..., None], end)[..., 0]
        codes.reserve(end)
        codes.crop(self.count)
        return codes, self.keys, self.values

    def steps(self, q: Tensor) -> bool:
        """Whether `step` serves such queries."""
        return self.codes is not None and kernel_serves(self.codes, q)

    def step(
        self, q: Tensor, new: tuple[Tensor, Tensor], groups: Tensor, count: int, near: Attended, k: int, scale: float
    ) -> tuple[Attended, Tensor]:
        """Store one token, new [B, Hkv, 1, ·], and read; see `attend_step`."""
        assert self.keys is not None and self.values is not None
        codes, *stored = self._reserve(self.keys, self.values, self.count + 1)
        found = attend_step(codes, (stored[0], stored[1]), groups, q, new, new[0].shape[1], count, near, k, scale)
        self.count += 1
        return found

    def _room(self, old: Tensor | None, like: Tensor, end: int) -> Tensor:
        """[M, room, D] with room for `end` rows of this dtype and size, with the rows that were there."""
        if old is not None and end <= old.shape[1]:
            return old
        size = (len(like), max(end, 256, 3 * self.count // 2), like.shape[2])
        if self.folder is None:
            made = like.new_empty(size)
        else:
            with tempfile.NamedTemporaryFile(dir=self.folder) as file:  # the mapping outlives its name
                _take_room(file.fileno(), math.prod(size) * like.itemsize, self.folder)
                made = torch.from_file(file.name, shared=True, size=math.prod(size), dtype=like.dtype).view(size)
        if old is not None:
            made[:, : self.count] = old[:, : self.count]
        return made

    def attend(self, q: Tensor, count: int, near: Attended, k: int, scale: float) -> tuple[Attended, Tensor]:
        """One query of each head, q [B, G·S, D], over the first `count` rows, joined with what the rings gave;
        certificates [B, G·S, 1]."""
        if count <= 0:
            return near, torch.zeros_like(near.lse)
        codes = self.codes
        assert codes is not None and self.keys is not None and self.values is not None
        flat, held = q.reshape(len(self.keys), -1, q.shape[2]), codes.count
        codes.count = count
        try:
            ids = find_rows(codes, self.keys, flat, k)
        finally:
            codes.count = held
        found = attend_rows(flat, self.keys, self.values, ids, scale)
        far = Attended(found.out.view(*q.shape[:2], 1, -1), found.lse.view_as(near.lse))
        merged = merge([near, far])
        if count <= k:
            return merged, torch.zeros_like(near.lse)
        rest = math.log(count - k) + found.lowest.view_as(near.lse)
        return merged, (rest - merged.lse).sigmoid()

    def take_rows(self, index: Tensor) -> None:
        if self.folder is not None:
            raise ValueError("a store in files cannot copy rows, as beams do; use folder=None")
        codes = self.codes
        assert codes is not None and codes.scales is not None and self.keys is not None and self.values is not None
        stores = (index[:, None] * self.heads + torch.arange(self.heads)).flatten()
        self.keys, self.values = self.keys[stores], self.values[stores]
        codes.rows, codes.scales = codes.rows[stores], codes.scales[stores]
        codes.error, codes.longest = codes.error[stores], codes.longest[stores]

    def bytes(self) -> int:
        """In RAM."""
        held = 0 if self.codes is None or self.mapped else self.codes.bytes()
        if self.folder is None and self.keys is not None and self.values is not None:
            held += sum(t.numel() * t.element_size() for t in (self.keys, self.values))
        return held


def _take_room(file: int, size: int, folder: str | Path) -> None:
    """On a disk without room, writing to a mapped file would end the process."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        raise OSError(
            f"folder {str(folder)!r} has no room for {size:,} more bytes of a store ({error.strerror}); make room, or "
            "pass another folder"
        ) from error
