"""Decoding token by token with a KV cache: each layer stores the keys and values that its heads still see, so the cost
of a new token does not grow with the text.

Shapes: B batch, T new tokens, H heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.depth import Exits
from spanformer.memory import ByHead, Cache, HeadCache, LayerCall, LayerMemory, MemoryShape, OwnMemory, Source
from spanformer.memory.base import unread
from spanformer.memory.cache import CacheLayer, CacheSettings
from spanformer.memory.checks import check_lengths
from spanformer.memory.deferred import Deferred
from spanformer.model.decoding_rules import DecodingRules, reaches
from spanformer.ops import Attended
from spanformer.ops.decode.codes import Bits
from spanformer.position import Encode, Position

if TYPE_CHECKING:
    from spanformer.model.decoder import Decoder

CHUNK = 1024  # tokens of a long text that go through the layers at a time
ZEROS = 1 << 40  # with `paper_compat`: the number of zeros before a text, more than any head can see

Logits = Literal["all", "last", "none"]


def make_cache(
    lm: Decoder, batch: int, slack: int, bits: Bits, sources: Sequence[Source] = ()
) -> Cache:  # fmt: skip
    for name, value in (("batch", batch), ("slack", slack)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value}; expected a whole number of at least 0")
    mechanisms = [block.attention.mechanism for block in lm.decoding_rules.blocks]  # without those of an encoder
    for mechanism, position in zip(mechanisms, lm.positions(), strict=True):
        if refused := mechanism.supports(position=position, cache=True):
            raise ValueError(refused[0])
    weight, config = next(lm.blocks.parameters()), lm.config
    token_bytes = len(mechanisms) * config.groups * 2 * config.head_dim * weight.dtype.itemsize
    settings = CacheSettings(ZEROS if config.paper_compat else 0, slack, bits, token_bytes)
    with torch.inference_mode(False):  # so that both modes can write to it
        place = torch.full((batch,), settings.zeros)
    reach = iter(reaches(lm))

    def rings(mechanism: Attention, shape: MemoryShape) -> HeadCache:
        return HeadCache(
            batch, next(reach), config.head_dim, slack=slack, bits=bits, dtype=weight.dtype, device=weight.device,
            zeros=settings.zeros, place=place, sink_tokens=mechanism.sink_tokens,
            notes=config.heads // config.groups if mechanism.rule_needs() == "states" else 0,
        )  # fmt: skip

    shape = MemoryShape(batch, config.groups, config.head_dim, slack, weight.dtype, weight.device, in_place=True)
    layers = [block.new_memory(shape, rings) for block in lm.decoding_rules.blocks]
    return Cache(lm, layers, place, settings, sources, defer_skipped(lm, layers))


def defer_skipped(lm: Decoder, layers: Sequence[CacheLayer]) -> Deferred | None:
    """Where skipped layers store keys and values later; None: at once."""
    held = [layer for layer in layers if isinstance(layer, HeadCache) and not layer.notes]
    plain = lm.config.stack == "residual" and not lm.config.position.per_layer and not lm.config.paper_compat
    if not isinstance(lm.depth, Exits) or not lm.depth.lazy or not plain or len(held) < len(layers):
        return None
    return Deferred(held, lm.config.dim, Projection(lm))


class Projection:
    """Keys and values of states [m, dim] at positions at [m] in a layer, [m, Hkv, D] each. Layers with one encoding
    that are asked for the same tokens in turn share its angles."""

    def __init__(self, lm: Decoder) -> None:
        self.blocks, self.positions = lm.ordered_blocks(), lm.positions()
        self._encode: tuple[Position, Tensor, Encode | None] | None = None

    def __call__(self, layer: int, states: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        block = self.blocks[layer]
        k, v = block.attention.project(block.norm1(states[None]))
        if (encode := self._encoding(self.positions[layer], at, states.dtype)) is not None:
            queries = k.new_zeros(1, block.attention.heads, *k.shape[2:])
            k = encode(queries, k)[1]
        return k[0].transpose(0, 1), v[0].transpose(0, 1)

    def _encoding(self, position: Position, at: Tensor, dtype: torch.dtype) -> Encode | None:
        held = self._encode
        if held is None or held[0] is not position or held[1] is not at:
            self._encode = held = position, at, position.encode_at(lambda: at, dtype)
        return held[2]


@torch.inference_mode()
def read(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    """See `LM.decode`."""
    lengths = _check(lm, x, cache, lengths, logits)
    lm.decoding_rules.renew(lm, cache)
    training = lm.training
    if training:
        lm.eval()
    try:
        return _read_pieces(lm, x, cache, lengths, logits)
    finally:
        if training:
            lm.train()


def _read_pieces(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    """Run a long text through all layers piece by piece, so that only one piece is in memory at a time."""
    every, last = [], None
    for start in range(0, x.shape[1], CHUNK):
        piece = x[:, start : start + CHUNK]
        real = None if lengths is None else (lengths - start).clamp(0, piece.shape[1])
        h = lm.output_states(_read_piece(lm, lm.embedding(piece), cache, real), piece, cache, real)
        if logits == "all":
            every.append(lm.head.logits(h))
        elif logits == "last":
            last = h[:, -1] if real is None else _last_real(h, real, last)
    if logits == "last":
        assert last is not None
        return lm.head.logits(last[:, None])[:, 0]
    return None if logits == "none" else every[0] if len(every) == 1 else torch.cat(every, 1)


def _last_real(h: Tensor, real: Tensor, last: Tensor | None) -> Tensor:
    """[B, dim] of each row's last token that is not padding; if this piece has none, of an earlier piece."""
    row, real = torch.arange(len(h), device=h.device), real.to(h.device)
    here = h[row, (real - 1).clamp(min=0)]
    return torch.where((real > 0)[:, None], here, torch.zeros_like(here) if last is None else last)


@torch.inference_mode()
def read_embedded(lm: Decoder, h: Tensor, cache: Cache) -> Tensor:
    """The next embedded tokens h [B, T, dim] of each row of the KV cache → the last block's output. The model must not
    be training."""
    lm.decoding_rules.renew(lm, cache)
    return _read_piece(lm, h, cache, None)


def _read_piece(lm: Decoder, x: Tensor, cache: Cache, real: Tensor | None) -> Tensor:
    """Embedded tokens x [B, T, dim] → the last block's output [B, T, dim]; advances the KV cache."""
    step, deferred = Step(cache.seen, x, real), cache.deferred
    rules, numbers = lm.decoding_rules, itertools.count()

    def ready(part: HeadCache | OwnMemory) -> LayerMemory:
        return RingMemory(part, rules, next(numbers), step, deferred) if isinstance(part, HeadCache) else part

    memories = [layer.change(ready) if isinstance(layer, ByHead) else ready(layer) for layer in cache.layers]
    own = len(cache.rings()) < len(cache.parts())
    view = step.view() if own else View(lazy=deferred is not None)
    h, _ = lm.run_blocks(x, memories, view, step.add_positions, cache.sources)
    if deferred is not None and lm.depth is not None and lm.depth.latest is not None:
        deferred.defer(h, lm.depth.latest, real)
    cache.layers = [_held(memory) for memory in memories]
    cache.advance(x.shape[1], real)
    return h


def _held(memory: LayerMemory) -> CacheLayer:
    if isinstance(memory, ByHead):
        return memory.change(_held)
    return memory.cache if isinstance(memory, RingMemory) else memory  # pyright: ignore[reportReturnType]


class Step:
    """The positions of each row's new tokens. seen [B]: earlier tokens; real [B]: how many of T are not padding, None
    for all."""

    def __init__(self, seen: Tensor, x: Tensor, real: Tensor | None) -> None:
        self.seen, self.x, self.real = seen, x, real
        self._encode: tuple[Position, Encode | None] | None = None

    def add_positions(self, position: Position, h: Tensor) -> Tensor:
        return _embed(position, h, self.seen, self.real)

    def view(self) -> View:
        """The view of the new tokens, for mechanisms' own memories: their positions and padding."""
        at, padding = _positions(self.seen, self.x), None
        if self.real is not None:
            padding = torch.arange(self.x.shape[1], device=at.device) >= self.real.to(at.device)[:, None]
        return View(q_positions=at, k_positions=at, padding=padding)

    def encode(self, position: Position, dtype: torch.dtype) -> Encode | None:
        """The encoding of queries and keys, computed once for layers that share it."""
        if self._encode is None or self._encode[0] is not position:
            self._encode = position, position.encode_at(lambda: _positions(self.seen, self.x), dtype)
        return self._encode[1]


class RingMemory:
    """A layer's memory in decoding: the keys and values that its heads still see (`HeadCache`), written in place."""

    tokens = 0
    latest: Tensor
    """[B, T, dim] the states of the latest tokens, which a memory of hidden states would keep"""

    def __init__(
        self, cache: HeadCache, rules: DecodingRules, part: int, step: Step, deferred: Deferred | None = None
    ) -> None:
        """part: its index in `rules.parts`; with `deferred`, the layer's."""
        self.cache, self.rules, self.part, self.step, self.deferred = cache, rules, part, step, deferred

    def attend(self, call: LayerCall) -> tuple[Attended, None]:
        encode, mechanism, x = self.step.encode(call.position, call.q.dtype), call.mechanism, call.view.x
        q, k = (call.q, call.k) if encode is None else encode(call.q, call.k)
        lengths, backend = self.step.real, mechanism.backend
        if self.deferred is not None:
            self.deferred.flush(self.part, call.view.active, x.shape[1])
        if call.view.nobody and not self.cache.notes:
            self.cache.store_tokens(k, call.v, lengths)
            return unread(call), None
        if mechanism.rule_needs() != "nothing":
            rule_for = self.rules.rule_for(self.part, x)
            return self.cache.read_placed(q, k, call.v, rule_for, lengths=lengths, backend=backend), None
        rule = self.rules.rule(self.part, x)
        return self.cache.read(q, k, call.v, rule, lengths=lengths, backend=backend), None

    def keep(self, states: Tensor) -> RingMemory:
        self.latest = states
        return self

    def bytes(self) -> int:
        return self.cache.bytes()

    def tensors(self) -> dict[str, Tensor]:
        return self.cache.tensors()

    def with_tensors(self, tensors: dict[str, Tensor]) -> RingMemory:
        self.cache.load(tensors)
        return self


def _embed(position: Position, h: Tensor, seen: Tensor, real: Tensor | None) -> Tensor:
    """Rows may begin at different positions; padding has none."""
    if type(position).embed is Position.embed:
        return h
    if real is None and len(seen) and bool((seen == seen[0]).all()):
        return position.embed(h, int(seen[0]))
    rows = []
    for row, start, n in zip(h, seen.tolist(), [h.shape[1]] * len(h) if real is None else real.tolist(), strict=True):
        rows += [torch.cat([position.embed(row[None, :n], start), row[None, n:]], 1)]
    return torch.cat(rows) if rows else h


def _positions(seen: Tensor, x: Tensor) -> Tensor:
    """[B, T] the positions of the tokens of x; [T] if all rows agree."""
    step = torch.arange(x.shape[1], device=x.device)
    if len(seen) and bool((seen == seen[0]).all()):
        return step + int(seen[0])
    return seen.to(x.device)[:, None] + step


def _check(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    if x.ndim != 2 or x.is_floating_point() or not x.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], T at least 1")
    if cache.maker is not lm:
        raise ValueError("the KV cache belongs to another model; make one by this model's cache()")
    weight, held = next(lm.blocks.parameters()), next(iter(cache.rings()), None)
    if held is not None and (weight.dtype, weight.device) != (held.dtype, held.device):
        raise ValueError(
            f"the KV cache was made for {held.dtype} on {held.device} and the model has {weight.dtype} on "
            f"{weight.device} "
            "now; make a new one by model.cache()"
        )
    if len(x) != cache.batch:
        raise ValueError(f"x has shape {list(x.shape)}; expected {cache.batch} rows, as the KV cache has")
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits is {logits!r}; expected 'all', 'last' or 'none'")
    lengths = check_lengths(lengths, len(x), x.shape[1])
    return None if lengths is None or bool((lengths == x.shape[1]).all()) else lengths
