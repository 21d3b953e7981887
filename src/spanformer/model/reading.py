"""Reading a text little by little: what a layer's heads still see is kept as keys and values, and each new token costs
what it sees, however long the text has become.

Shapes: B batch, T new tokens, H heads, Hkv key/value heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.memory import Cache, HeadCache, Source
from spanformer.memory.checks import check_lengths
from spanformer.memory.head_cache import RuleFor
from spanformer.memory.notes import noteworthy
from spanformer.model.block import Block
from spanformer.model.layer import SelfAttention, split_heads
from spanformer.ops import Rule, merge
from spanformer.position import Position, Turner

if TYPE_CHECKING:
    from spanformer.model.decoder import Decoder

CHUNK = 1024  # tokens of a long text that go through the layers at a time
ZEROS = 1 << 40  # with `original`: so many zeros stand before a text, more than any head sees

Logits = Literal["all", "last", "none"]


def make_cache(
    lm: Decoder, batch: int, slack: int, bits: Literal[0, 8], sources: Sequence[Source] = ()
) -> Cache:  # fmt: skip
    for name, value in (("batch", batch), ("slack", slack)):
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} is {value}; expected a whole number, 0 or more")
    mechanisms = [block.attention.mechanism for block in lm.reader.blocks]  # without an encoder's
    for mechanism in mechanisms:
        if mechanism.alone:
            raise ValueError(
                f"{type(mechanism).__name__} mixes values in its own way, which a cache does not know; read the text "
                "by segments, lm(x, state)"
            )
    weight = next(lm.blocks.parameters())
    zeros = ZEROS if lm.config.original else 0
    with torch.inference_mode(False):  # to be written to in or out of it
        place = torch.full((batch,), zeros)
    layers = [
        HeadCache(
            batch, reach, lm.config.head_dim, slack=slack, bits=bits, dtype=weight.dtype, device=weight.device,
            zeros=zeros, place=place, kept=mechanism.kept,
            notes=lm.config.heads // lm.config.groups if mechanism.reads_keys else 0,
        )
        for reach, mechanism in zip(reaches(lm), mechanisms, strict=True)
    ]  # fmt: skip
    return Cache(lm, layers, sources)


def reaches(lm: Decoder) -> list[list[int]]:
    """[layers][Hkv] how many positions each key/value head's ring holds: what the longest head of its group looks back
    at, and the token itself."""
    shared = lm.config.heads // lm.config.groups
    return [
        [max(layer[h : h + shared]) + 1 for h in range(0, len(layer), shared)]
        for layer in lm.lookback()
    ]  # fmt: skip


class Reader:
    """A model's rules as they are now. They stay the same objects until a span or a position's table changes, so that
    what is prepared for them serves many tokens."""

    def __init__(self, lm: Decoder) -> None:
        self.blocks = [block for block in lm.blocks if isinstance(block, Block)]
        self.watched = [
            (module, name)
            for part in (*(block.attention.mechanism for block in self.blocks), lm.position)
            for module in part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None  # a bias that a product does without
        ]
        self.stamp: list[tuple[int, int, int]] | None = None
        self.lookback: list[list[int]] = []
        self.reach: list[list[int]] = []
        self.rules: list[Rule | None] = []
        self.added: list[Rule | None] = []

    def renew(self, lm: Decoder, cache: Cache) -> None:
        """See whether anything has changed, and fit the cache to it."""
        # written in place, replaced, or moved to another dtype or device
        stamp = [(id(p := getattr(module, name)), p._version, p.data_ptr()) for module, name in self.watched]
        if stamp != self.stamp:
            self.stamp, self.rules = stamp, [None] * len(self.blocks)
            self.lookback, self.reach = lm.lookback(), reaches(lm)
            each = zip(lm.positions(), self.lookback, strict=True)
            self.added = [position.rule(View(), max(lookback) + 1) for position, lookback in each]
        for layer, reach in zip(cache.layers, self.reach, strict=True):
            if layer.reach != reach:
                layer.resize(reach)

    def rule(self, n: int, x: Tensor) -> Rule:
        """What the heads of layer n see, for hidden states x [B, T, dim]."""
        if (known := self.rules[n]) is not None:
            return known
        mechanism, added = self.blocks[n].attention.mechanism, self.added[n]
        rule = mechanism.rule(View(x=x))
        rule = rule if added is None else rule + added
        if not rule.dynamic:
            self.rules[n] = rule
        return rule

    def rule_for(self, n: int, x: Tensor) -> RuleFor:
        """The rule of a layer whose rules depend on which keys there are."""
        mechanism, added = self.blocks[n].attention.mechanism, self.added[n]

        def make(rows: Tensor, start: int, length: int) -> Rule:
            some = x[rows.to(x.device)]
            # A cache holds no hidden states: terms made of keys are those of the new ones, and the cache has noted the
            # earlier ones'.
            keys = some if mechanism.reads_keys else None
            rule = mechanism.rule(View(x=some, start=start, length=length, keys=keys))
            if mechanism.reads_keys and not noteworthy(rule):
                raise ValueError(
                    f"{type(mechanism).__name__} reads the hidden states of its keys, which a cache does not hold; "
                    "read the text by segments, lm(x, state)"
                )
            return rule if added is None else rule + added

        return make


@torch.inference_mode()
def read(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    """See `LM.read`."""
    lengths = _check(lm, x, cache, lengths, logits)
    lm.reader.renew(lm, cache)
    training = lm.training
    if training:
        lm.eval()
    try:
        return _read_pieces(lm, x, cache, lengths, logits)
    finally:
        if training:
            lm.train()


def _read_pieces(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    """A long text goes through all layers piece by piece, so that no more than a piece of it is held at a time."""
    every, last = [], None
    for start in range(0, x.shape[1], CHUNK):
        piece = x[:, start : start + CHUNK]
        real = None if lengths is None else (lengths - start).clamp(0, piece.shape[1])
        h = _read_piece(lm, piece, cache, real)
        if logits == "all":
            every.append(lm.head.logits(lm.norm(h)))
        elif logits == "last":
            last = h[:, -1] if real is None else _last_real(h, real, last)
    if logits == "last":
        assert last is not None
        return lm.head.logits(lm.norm(last[:, None]))[:, 0]
    return None if logits == "none" else every[0] if len(every) == 1 else torch.cat(every, 1)


def _last_real(h: Tensor, real: Tensor, last: Tensor | None) -> Tensor:
    """[B, dim] of each row's last token that is no padding; of an earlier piece where this one has none."""
    row, real = torch.arange(len(h), device=h.device), real.to(h.device)
    here = h[row, (real - 1).clamp(min=0)]
    return torch.where((real > 0)[:, None], here, torch.zeros_like(here) if last is None else last)


def _read_piece(lm: Decoder, x: Tensor, cache: Cache, real: Tensor | None) -> Tensor:
    """x [B, T] → the last block's output [B, T, dim]; the cache is moved on."""
    seen, reader = cache.seen, lm.reader
    h, turn = lm.embedding(x), None
    sources = cache.sources or [None] * len(reader.blocks)
    layers = zip(reader.blocks, cache.layers, lm.positions(), sources, strict=True)
    for n, (block, layer, position, source) in enumerate(layers):
        if not n or lm.config.position.per_layer:
            h = _embed(position, h, seen, real)
            turn = position.turner(lambda: _positions(seen, x), h.dtype)
        y = block.norm1(h) if block.pre else h
        found = _attend(block.attention, y, layer, reader, n, turn, real)
        h = block.feed(block.listen(h + found if block.pre else block.norm1(h + found), source))[0]
    cache.advance(x.shape[1], real)
    return h


def _attend(
    attention: SelfAttention, x: Tensor, layer: HeadCache, reader: Reader, n: int,
    turn: Turner | None, real: Tensor | None,
) -> Tensor:  # fmt: skip
    """[B, T, dim] of the layer's attention to what it still holds and to x [B, T, dim]."""
    q = attention.mechanism.map_queries(split_heads(attention.query(x), attention.heads))
    k, v = (split_heads(project(x), attention.kv_heads) for project in (attention.key, attention.value))
    turned, k = (q, k) if turn is None else turn(q, k)
    backend = attention.mechanism.backend
    if attention.mechanism.placed:
        found = layer.read_placed(turned, k, v, reader.rule_for(n, x), lengths=real, backend=backend)
    else:
        found = layer.read(turned, k, v, reader.rule(n, x), lengths=real, backend=backend)
    if attention.persistent is not None:
        found = merge([found, attention.persistent.attend(q, backend=backend)])
    return attention.out(found.out.transpose(1, 2).reshape(x.shape))


def _embed(position: Position, h: Tensor, seen: Tensor, real: Tensor | None) -> Tensor:
    """Rows may begin at different places; padding stands nowhere."""
    if type(position).embed is Position.embed:
        return h
    if real is None and len(seen) and bool((seen == seen[0]).all()):
        return position.embed(h, int(seen[0]))
    rows = []
    for row, start, n in zip(h, seen.tolist(), [h.shape[1]] * len(h) if real is None else real.tolist(), strict=True):
        rows += [torch.cat([position.embed(row[None, :n], start), row[None, n:]], 1)]
    return torch.cat(rows) if rows else h


def _positions(seen: Tensor, x: Tensor) -> Tensor:
    """[B, T] where the tokens of x stand; [T] if all rows agree."""
    step = torch.arange(x.shape[1], device=x.device)
    if len(seen) and bool((seen == seen[0]).all()):
        return step + int(seen[0])
    return seen.to(x.device)[:, None] + step


def _check(lm: Decoder, x: Tensor, cache: Cache, lengths: Tensor | None, logits: Logits) -> Tensor | None:
    if x.ndim != 2 or x.is_floating_point() or not x.shape[1]:
        raise ValueError(f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], T at least 1")
    if cache.maker is not lm:
        raise ValueError("the cache belongs to another model; make one with this model's cache()")
    weight, held = next(lm.blocks.parameters()), cache.layers[0]
    if (weight.dtype, weight.device) != (held.dtype, held.device):
        raise ValueError(
            f"the cache was made for {held.dtype} on {held.device} and the model has {weight.dtype} on {weight.device} "
            "now; make another one with its cache()"
        )
    if len(x) != cache.batch:
        raise ValueError(f"x has shape {list(x.shape)}; expected {cache.batch} rows, as the cache has")
    if logits not in ("all", "last", "none"):
        raise ValueError(f"logits is {logits!r}; expected 'all', 'last' or 'none'")
    lengths = check_lengths(lengths, len(x), x.shape[1])
    return None if lengths is None or bool((lengths == x.shape[1]).all()) else lengths
