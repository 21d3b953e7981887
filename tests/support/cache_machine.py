"""A state machine over the KV cache: after any sequence of read, crop, reorder, fork, resize, save and load, it gives
what attention over the whole history gives, recomputed in float64 from the equations.

Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, N tokens of a row, D head size.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from spanformer.memory import Cache, HeadCache
from spanformer.memory.cache import CacheSettings
from spanformer.ops import Rule, kernel
from spanformer.ops.decode.codes import RECENT, Bits, vector_bytes
from support.rounded import held

HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 8, 2
SHARED = HEADS // KV_HEADS
LONGEST = 24  # tokens that a ring may hold
MANY = 1 << 40  # zeros before a text, as language models with `zeros` have them
BACKENDS = ["auto", "banded"] if kernel.problem() else ["auto", "native", "banded"]
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
counted = {"examples": 0, "steps": 0}
"""how much has been tried, for whoever runs the machine by hand"""


@dataclass(frozen=True)
class Setting:
    """What does not change in the life of a cache."""

    kept: int
    zeros: int
    bits: Bits
    spans: bool
    sinks: bool

    def rule(self, reach: list[int]) -> Rule:
        """Of one layer whose rings hold `reach` [Hkv]; the second head of a group sees half as far as the first."""
        limits = [max(1, n // (1 + h)) for n in reach for h in range(SHARED)]
        span = torch.tensor([0.6 * n for n in limits]) if self.spans else None
        sinks = torch.linspace(-1, 1, HEADS) if self.sinks else None
        return Rule(HEADS, reach=limits, span=span, ramp=3.0, sink_tokens=self.kept, sink_logits=sinks)


@dataclass
class Row:
    """All that one row has read, by layer: keys and values [Hkv, N, D] in float64."""

    keys: list[Tensor]
    values: list[Tensor]
    since: list[int]
    """by layer: earlier positions are not held in 8 bits beside 4"""
    forgotten: list[list[int]]
    """by layer and key/value head: positions below were lost when a ring was resized"""
    resized: list[list[int]]
    """by layer and key/value head: how many tokens the row had when the last of them were lost"""
    written: list[int]
    """by layer: the most tokens its rings were given; what is beyond the row's length was cropped"""

    def __len__(self) -> int:
        return self.keys[0].shape[1]

    def copy(self) -> Row:
        lost = ([list(each) for each in layers] for layers in (self.forgotten, self.resized))
        return Row(list(self.keys), list(self.values), list(self.since), *lost, list(self.written))

    def forget(self, layer: int, capacities: list[int]) -> None:
        """Rings of these capacities [Hkv] are replaced: what they have overwritten is lost."""
        for g, capacity in enumerate(capacities):
            lost = min(self.written[layer] - capacity, len(self))
            if lost > self.forgotten[layer][g]:
                self.forgotten[layer][g], self.resized[layer][g] = lost, len(self)
        self.written[layer] = len(self)

    def crop(self, left: int) -> None:
        """What is read from here on is a new text."""
        self.keys, self.values = ([t[:, :left] for t in held] for held in (self.keys, self.values))
        for layers in (self.forgotten, self.resized):
            layers[:] = [[min(n, left) for n in each] for each in layers]


class Model:
    """Makes caches, as a language model does; its config and weights are what `load` compares."""

    def __init__(self, setting: Setting, reach: list[list[int]]) -> None:
        self.config, self.setting, self.reach = setting, setting, reach

    def state_dict(self) -> dict[str, Tensor]:
        return {"weight": torch.ones(2)}

    def cache(self, batch: int, *, slack: int = 0, bits: Bits = 0) -> Cache:
        s, layers = self.setting, []
        for reach in self.reach:
            place = layers[0].place if layers else None
            layers.append(
                HeadCache(batch, reach, SIZE, sink_tokens=s.kept, slack=slack, bits=bits, zeros=s.zeros, place=place)
            )
        token_bytes = len(layers) * len(self.reach[0]) * 2 * SIZE * 4
        return Cache(self, layers, layers[0].place, CacheSettings(s.zeros, slack, bits, token_bytes))


@dataclass
class Pair:
    """A cache, and what it should be."""

    cache: Cache
    rows: list[Row]
    reach: list[list[int]]
    slack: int
    setting: Setting
    rules: list[Rule] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rules = [self.setting.rule(reach) for reach in self.reach]

    def with_rows(self, cache: Cache, rows: list[int]) -> Pair:
        return Pair(cache, [self.rows[b].copy() for b in rows], self.reach, self.slack, self.setting)


def stored(row: Row, layer: int, setting: Setting, k: Tensor, v: Tensor, alone: bool) -> list[Tensor]:
    """Keys and values [Hkv, N + T, D] as the cache gives them. One token alone is stored first and then attended to; of
    several, each sees the others as they came."""
    found, rounding = [], (row.since[layer], setting.kept)
    for kind, (old, new) in enumerate(((row.keys[layer], k), (row.values[layer], v))):
        parts = [torch.cat([old, new], 1)] if alone else [old, new]
        parts[0] = held(parts[0], setting.bits, kind, *rounding)
        found.append(torch.cat(parts, 1))
    return found


def expected(row: Row, layer: int, pair: Pair, q: Tensor, k: Tensor, v: Tensor, alone: bool) -> tuple[Tensor, Tensor]:
    """(out [H, T, D], lse [H, T]) of new tokens q [H, T, D] whose keys and values are k and v [Hkv, T, D]."""
    setting, rule, new = pair.setting, pair.rules[layer], q.shape[1]
    ahead = min(setting.zeros, 2 * LONGEST)
    past = len(row)
    position = torch.arange(-ahead, past + new)
    distance = (past + torch.arange(new))[:, None] - position  # [T, keys]
    outs, lses = [], []
    seen = stored(row, layer, setting, k, v, alone)
    for head, limit in enumerate(rule.limits()):
        g = head // SHARED
        forgotten = row.forgotten[layer][g]
        both = [t[g] for t in seen]
        if setting.zeros:
            # what a ring forgot is zeros again, as before the text
            kept = (torch.arange(past + new) >= forgotten)[:, None]
            both = [torch.cat([torch.zeros(ahead, SIZE).double(), one * kept]) for one in both]
        keys, values = both
        weight = torch.ones_like(distance, dtype=torch.float64)
        if rule.span is not None:
            weight = ((float(rule.span[head]) + rule.ramp - distance.double()) / rule.ramp).clamp(0, 1)
        weight = torch.where((distance >= 0) & (distance < limit), weight, 0.0)
        if not setting.zeros:
            weight = torch.where(position >= forgotten, weight, 0.0)
        weight = torch.where((position < setting.kept) & (distance >= 0) & (position >= 0), 1.0, weight)
        score = q[head] @ keys.T / math.sqrt(SIZE) + weight.log()
        if rule.sink_logits is not None:
            sink = rule.sink_logits[head].double().expand(new, 1)
            score, values = torch.cat([score, sink], 1), torch.cat([values, torch.zeros(1, SIZE).double()])
        lses.append(score.logsumexp(-1))
        outs.append(score.softmax(-1) @ values)
    return torch.stack(outs), torch.stack(lses)


reaches = st.lists(
    st.lists(st.integers(1, LONGEST), min_size=KV_HEADS, max_size=KV_HEADS), min_size=LAYERS, max_size=LAYERS
)
seeds = st.integers(0, 1 << 20)


class CacheMachine(RuleBasedStateMachine):
    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spanformer-cache-"))
        self.all: list[Pair] = []
        counted["examples"] += 1

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _add(self, pair: Pair) -> Pair:
        self.all.append(pair)
        return pair

    @initialize(
        target=pairs, batch=st.integers(1, 3), reach=reaches, slack=st.integers(0, 4), kept=st.sampled_from([0, 3]),
        zeros=st.sampled_from([0, 0, 6, MANY]), bits=st.sampled_from([0, 8, 4]), spans=st.booleans(),
        sinks=st.booleans(),
    )  # fmt: skip
    def begin(self, batch, reach, slack, kept, zeros, bits, spans, sinks) -> Pair:
        self.setting = Setting(0 if zeros else kept, zeros, bits, spans, sinks)
        self.model = Model(self.setting, reach)
        none = [torch.zeros(KV_HEADS, 0, SIZE, dtype=torch.float64)] * LAYERS
        nothing = [[0] * KV_HEADS] * LAYERS
        rows = [Row(none, none, [0] * LAYERS, nothing, nothing, [0] * LAYERS).copy() for _ in range(batch)]
        return self._add(Pair(self.model.cache(batch, slack=slack, bits=bits), rows, reach, slack, self.setting))

    @rule(pair=pairs, tokens=st.integers(1, 12), seed=seeds, backend=st.sampled_from(BACKENDS), data=st.data())
    def read(self, pair: Pair, tokens: int, seed: int, backend: str, data: st.DataObject) -> None:
        """Several tokens at once, all rows alike, or a number for each."""
        batch, some = len(pair.rows), st.integers(0, tokens)
        lengths = data.draw(st.none() | st.lists(some, min_size=batch, max_size=batch), label="lengths")
        self._read(pair, tokens, lengths, seed, backend)

    @rule(pair=pairs, steps=st.integers(1, 8), seed=seeds, backend=st.sampled_from(BACKENDS))
    def decode(self, pair: Pair, steps: int, seed: int, backend: str) -> None:
        for n in range(steps):
            self._read(pair, 1, None, seed + n, backend)

    def _read(self, pair: Pair, tokens: int, lengths: list[int] | None, seed: int, backend: str) -> None:
        counted["steps"] += 1
        make, batch = torch.Generator().manual_seed(seed), len(pair.rows)
        real = lengths or [tokens] * batch
        alone = tokens == 1 and lengths is None
        read: list[tuple[Tensor, Tensor]] = []
        for n, layer in enumerate(pair.cache.layers):
            q, k, v = (torch.randn(batch, h, tokens, SIZE, generator=make) for h in (HEADS, KV_HEADS, KV_HEADS))
            given = None if lengths is None else torch.tensor(lengths)
            found = layer.read(q, k, v, pair.rules[n], lengths=given, backend=backend)
            for b, row in enumerate(pair.rows):
                out, lse = expected(row, n, pair, *(t[b, :, : real[b]].double() for t in (q, k, v)), alone)
                torch.testing.assert_close(found.out[b, :, : real[b]].double(), out, **TOLERANCE)
                torch.testing.assert_close(found.lse[b, :, : real[b]].double(), lse, **TOLERANCE)
            read.append((k.double(), v.double()))
        pair.cache.advance(tokens, None if lengths is None else torch.tensor(lengths))
        for b, row in enumerate(pair.rows):
            for n, (k, v) in enumerate(read):
                row.keys[n] = torch.cat([row.keys[n], k[b, :, : real[b]]], 1)
                row.values[n] = torch.cat([row.values[n], v[b, :, : real[b]]], 1)
            row.written = [max(n, len(row)) for n in row.written]

    @rule(pair=pairs, data=st.data())
    def crop(self, pair: Pair, data: st.DataObject) -> None:
        back = [data.draw(st.integers(0, min(len(row), pair.slack + 2)), label="back") for row in pair.rows]
        self._crop(pair, back)

    def _crop(self, pair: Pair, back: list[int]) -> bool:
        """Whether it is accepted. An accepted crop is as if the rest had not been read; one that fits the slack, of
        tokens read since a ring lost any, is accepted; a refusal changes nothing, which later reads show."""
        lengths = torch.tensor([len(row) - n for row, n in zip(pair.rows, back, strict=True)])
        since = all(left >= max(map(max, row.resized)) for row, left in zip(pair.rows, lengths.tolist(), strict=True))
        intact = since and all([len(row)] * LAYERS == row.written for row in pair.rows)
        try:
            pair.cache.crop(lengths)
        except ValueError as error:
            assert "overwritten" in str(error) and not (intact and max(back) <= pair.slack), (back, str(error))
            return False
        for row, n in zip(pair.rows, back, strict=True):
            row.since = [max(s, w - RECENT - pair.slack) for s, w in zip(row.since, row.written, strict=True)]
            if n:
                self._check_crop(pair, row, len(row) - n)
                row.crop(len(row) - n)
        return True

    def _check_crop(self, pair: Pair, row: Row, left: int) -> None:
        """A row that had not read the rest would not have lost what its next token sees."""
        for n, reach in enumerate(pair.reach):
            for g, many in enumerate(reach):
                first = max(left - many + 1, self.setting.kept)
                assert left >= row.resized[n][g] or row.forgotten[n][g] <= first, (
                    f"cropped to {left}: layer {n}, head {g}"
                )

    @rule(pair=pairs, data=st.data())
    def reorder(self, pair: Pair, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(pair.rows) - 1), min_size=1, max_size=4), label="rows")
        pair.cache.reorder(torch.tensor(rows))
        pair.rows = [pair.rows[b].copy() for b in rows]

    @rule(target=pairs, pair=pairs, copies=st.integers(1, 2))
    def fork(self, pair: Pair, copies: int) -> Pair:
        """Both go on; what one reads the other does not see."""
        rows = [b for b in range(len(pair.rows)) for _ in range(copies)][:4]
        other = pair.cache.fork(copies)
        if len(rows) < other.batch:
            other.reorder(torch.arange(len(rows)))
        return self._add(pair.with_rows(other, rows))

    @rule(pair=pairs, reach=reaches, slack=st.integers(0, 4))
    def resize(self, pair: Pair, reach: list[list[int]], slack: int) -> None:
        """Rings for other spans: what the old ring no longer held stays forgotten."""
        for n, layer in enumerate(pair.cache.layers):
            if reach[n] == pair.reach[n] and slack == pair.slack:
                continue
            layer.resize(reach[n], slack)
            for row in pair.rows:
                lost = max(row.written[n] - was - pair.slack for was in pair.reach[n])
                if slack != pair.slack:
                    row.since[n] = max(row.since[n], len(row) - RECENT - min(slack, pair.slack))
                if self.setting.zeros:
                    row.since[n] = max(row.since[n], min(lost, len(row)))
                row.forget(n, [was + pair.slack for was in pair.reach[n]])
        pair.reach, pair.slack = reach, slack
        pair.rules = [self.setting.rule(each) for each in reach]

    @rule(target=pairs, pair=pairs)
    def save_and_load(self, pair: Pair) -> Pair:
        path = self.folder / "cache.safetensors"
        pair.cache.save(path)
        assert [p.name for p in self.folder.iterdir()] == [path.name], "nothing else is left in the folder"
        loaded = Cache.load(path, self.model)
        return self._add(pair.with_rows(loaded, list(range(len(pair.rows)))))

    @invariant()
    def counts_agree(self) -> None:
        for pair in self.all:
            assert pair.cache.seen.tolist() == [len(row) for row in pair.rows]
            assert pair.cache.slack == pair.slack
            slots = sum(n + pair.slack + self.setting.kept for reach in pair.reach for n in reach)
            each = 2 * vector_bytes(SIZE, self.setting.bits or 32)  # a key and a value
            near = LAYERS * KV_HEADS * (RECENT + pair.slack) * 2 * vector_bytes(SIZE, 8) * (self.setting.bits == 4)
            assert pair.cache.bytes() == len(pair.rows) * (slots * each + near)
