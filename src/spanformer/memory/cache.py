"""The KV cache of a model that decodes token by token.

Each layer has keys and values in rings (`HeadCache`), or its mechanism's own memory (`OwnMemory`), or both, if
its heads differ (`ByHead`). slots.py defines what one slot of a ring holds. Shapes: B batch.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spanformer.core.files import replace_file
from spanformer.memory.base import ByHead, OwnMemory, pick, rows_of
from spanformer.memory.checks import check_lengths_back
from spanformer.memory.deferred import Deferred
from spanformer.memory.digest import Maker, digest, digest_tensors
from spanformer.memory.head_cache import HeadCache
from spanformer.memory.lost import LOST
from spanformer.memory.source import Source
from spanformer.ops.decode.codes import Bits

KIND, FORMAT = "spanformer cache", 4
CacheLayer = HeadCache | OwnMemory | ByHead
MOST = 1 << 48  # a position beyond any real text, including the zeros before it


class CacheSettings(NamedTuple):
    """Settings that all layers of a KV cache share."""

    zeros: int = 0
    """tokens of zeros before every text, as in the paper's code"""
    slack: int = 0
    """how many tokens `Cache.crop` can always remove"""
    bits: Bits = 0
    """bits of each number in a ring; 0: the model's dtype"""
    token_bytes: int = 0
    """bytes that full attention keeps per token, in all layers"""


class CachedModel(Maker, Protocol):
    """A model that makes empty KV caches."""

    def cache(self, batch: int, *, slack: int = 0, bits: Bits = 0) -> Cache: ...


class Cache:
    """A KV cache. `LM.cache` makes it, `LM.decode` fills it. Rows may be at different positions."""

    def __init__(
        self, maker: Maker, layers: Sequence[CacheLayer], place: Tensor, settings: CacheSettings,
        sources: Sequence[Source] = (), deferred: Deferred | None = None,
    ) -> None:  # fmt: skip
        """place [B]: the position of each row's next token, shared by all rings. sources: in an encoder–decoder, each
        layer's keys and values of the source text. deferred: what skipped layers store later."""
        self.maker, self.layers, self.place, self.settings = maker, list(layers), place, settings
        self.sources, self.deferred = list(sources), deferred
        self.beside: Cache | None = None
        """of a frozen model that reads the same text to find neighbours"""
        assert all(ring.place is place for ring in self.rings())

    @property
    def seen(self) -> Tensor:
        """[B] int64 on the CPU: the number of tokens that each row has read."""
        return self.place - self.settings.zeros

    @property
    def batch(self) -> int:
        return len(self.place)

    @property
    def slack(self) -> int:
        return next((ring.slack for ring in self.rings()), self.settings.slack)  # rings may have been resized

    @property
    def bits(self) -> Bits:
        return self.settings.bits

    def parts(self) -> list[HeadCache | OwnMemory]:
        """The layers' memories, in order; a layer whose heads differ has several."""
        return [part for layer in self.layers for part in _parts(layer)]

    def rings(self) -> list[HeadCache]:
        """The memories that are rings of keys and values."""
        return [part for part in self.parts() if isinstance(part, HeadCache)]

    def bytes(self) -> int:
        """The exact number of bytes allocated for keys, values and states."""
        others = [other.bytes() for other in (self.deferred, self.beside) if other is not None]
        return sum([*(part.bytes() for part in self.parts()), *others])

    def full_bytes(self, context: int) -> int:
        """The bytes that full attention would keep for this many tokens of each row, in the model's dtype."""
        return self.batch * context * self.settings.token_bytes

    def advance(self, tokens: int, lengths: Tensor | None = None) -> None:
        """Advance every row by `tokens`, or by lengths [B]."""
        self.place += tokens if lengths is None else lengths.to("cpu", torch.int64)

    def crop(self, lengths: Tensor) -> None:
        """Shorten each row to lengths [B] tokens, as if it had not read the rest. Once a ring has wrapped, at most
        `slack` tokens can be removed; after a ring has grown, only tokens read since then."""
        lengths = lengths.to("cpu", torch.int64)
        for ring in self.rings():
            ring.check_crop(lengths)
        check_lengths_back(lengths, self.seen)
        back = self.seen - lengths
        self.layers = [_each(layer, lambda part: _crop(part, back)) for layer in self.layers]
        for ring in self.rings():
            ring.note_crop(lengths)
        self.place.copy_(lengths + self.settings.zeros)
        if self.deferred is not None:
            self.deferred.crop(self.place)
        if self.beside is not None:
            self.beside.crop(lengths)

    def resize(self, reach: Sequence[Sequence[int]]) -> None:
        """Rings [rings] for other reaches [Hkv], because spans have changed; see `HeadCache.resize`."""
        changed = [(ring, each) for ring, each in zip(self.rings(), reach, strict=True) if ring.reach != list(each)]
        if changed and self.deferred is not None:
            self.deferred.settle()
        for ring, each in changed:
            ring.resize(each)
        if changed and self.deferred is not None:
            self.deferred = self.deferred.emptied()

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes a copy of row rows[b], rows [B']; B' may differ from B."""
        other = self._rows(rows)
        self.place, self.layers, self.sources, self.deferred = other.place, other.layers, other.sources, other.deferred
        self.beside = other.beside

    def fork(self, copies: int) -> Cache:
        """A new KV cache with `copies` consecutive copies of every row; the two share no memory."""
        if copies < 1:
            raise ValueError(f"copies is {copies}; expected at least 1")
        return self._rows(torch.arange(self.batch).repeat_interleave(copies))

    def _rows(self, rows: Tensor) -> Cache:
        if rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise ValueError(f"rows has shape {list(rows.shape)} and dtype {rows.dtype}; expected row numbers [B']")
        rows = rows.to("cpu", torch.int64)
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < self.batch):
            raise ValueError(f"rows holds {rows.tolist()}; expected numbers 0 … {self.batch - 1}")
        with torch.inference_mode(False):  # so that both modes can write to it
            place = self.place[rows]

        def pick_rows(part: HeadCache | OwnMemory) -> HeadCache | OwnMemory:
            return part.rows(rows, place) if isinstance(part, HeadCache) else rows_of(part, rows)

        layers, sources = [_each(layer, pick_rows) for layer in self.layers], [s.rows(rows) for s in self.sources]
        other = Cache(self.maker, layers, place, self.settings, sources)
        other.deferred = None if self.deferred is None else self.deferred.rows(rows, other.rings())
        other.beside = None if self.beside is None else self.beside._rows(rows)
        return other

    def save(self, path: str | Path) -> None:
        """One safetensors file with all that decoding needs to continue, and a digest of the model. Written completely
        or not at all: to a temporary file first, which then replaces `path`."""
        if self.sources:
            raise ValueError("the KV cache of an encoder–decoder cannot be saved; call start again instead")
        if self.beside is not None:
            raise ValueError("the KV cache of a model with neighbours cannot be saved; decode the text again")
        if self.deferred is not None:
            self.deferred.settle()
        tensors = {"place": self.place}
        for n, layer in enumerate(self.layers):
            tensors |= {f"{n}.{name}": t for name, t in layer.tensors().items()}
        about = {"kind": KIND, "format": FORMAT, "maker": digest(self.maker), "slack": self.slack, "bits": self.bits}
        about["sha256"] = digest_tensors("", tensors)
        # these tensors share memory, which safetensors refuses
        apart = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
        _write(Path(path), apart, {"spanformer": json.dumps(about)})

    @staticmethod
    def load(path: str | Path, model: CachedModel) -> Cache:
        """Read a KV cache that `save` wrote for the same model; refuse that of another model."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("spanformer", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a saved KV cache ({error})") from error
        if not isinstance(about, dict) or about.get("kind") != KIND or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not a KV cache that this version of spanformer saved; decode the text again")
        if about.get("maker") != digest(model):
            raise ValueError(
                f"{path} was saved by another model, or before this one was trained further; decode the text again"
            )
        if about.get("sha256") != digest_tensors("", tensors):
            raise ValueError(f"{path} is damaged: its checksum does not match; decode the text again")
        try:
            return _fill(model, about, tensors)
        except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not have the tensors that its model needs ({error}); the file is damaged"
            ) from error


def _parts(layer: CacheLayer) -> list[HeadCache | OwnMemory]:
    return [part.memory for part in layer.parts] if isinstance(layer, ByHead) else [layer]


def _each(layer: CacheLayer, how: Callable[[HeadCache | OwnMemory], HeadCache | OwnMemory]) -> CacheLayer:
    return layer.change(how) if isinstance(layer, ByHead) else how(layer)


def _crop(part: HeadCache | OwnMemory, back: Tensor) -> HeadCache | OwnMemory:
    return part if isinstance(part, HeadCache) else part.crop(back)


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    try:
        path.parent.stat()  # a missing folder is a mistake: do not create it
        with replace_file(path) as new:
            save_file(tensors, new, header)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{path} could not be saved ({why}); the file that was there before is unchanged") from error


def _fill(model: CachedModel, about: dict, tensors: dict[str, Tensor]) -> Cache:
    slack, bits, place = about["slack"], about["bits"], tensors["place"]
    if type(slack) is not int or type(bits) is not int:
        raise ValueError(f"slack is {slack!r} and bits {bits!r}; expected whole numbers")
    # First an empty KV cache, which takes no memory: check the file's tensors before allocating what the file asks for.
    _check(model.cache(0, slack=slack, bits=bits), tensors)  # pyright: ignore[reportArgumentType]
    cache = model.cache(len(place), slack=slack, bits=bits)  # pyright: ignore[reportArgumentType]
    cache.layers = [_loaded(layer, pick(tensors, n)) for n, layer in enumerate(cache.layers)]
    cache.place.copy_(place)
    return cache


def _loaded(layer: CacheLayer, tensors: dict[str, Tensor]) -> CacheLayer:
    if isinstance(layer, HeadCache):
        layer.load(tensors)
        return layer
    if isinstance(layer, ByHead):
        numbers = itertools.count()
        return layer.change(lambda part: _loaded(part, pick(tensors, next(numbers))))
    return layer.with_tensors(tensors)


def _check(empty: Cache, tensors: dict[str, Tensor]) -> None:
    """Check that the tensors fit such a KV cache with any number of rows."""
    rows, zeros = len(tensors["place"]), empty.settings.zeros
    _check_numbers("place", tensors["place"], (rows,), zeros)
    for n, layer in enumerate(empty.layers):
        for m, part in enumerate(_parts(layer)):
            prefix = f"{n}.{m}." if isinstance(layer, ByHead) else f"{n}."
            if isinstance(part, HeadCache):
                _check_ring(part, prefix, tensors, rows, zeros)
            _check_shapes(part, prefix, tensors, rows)


def _check_ring(ring: HeadCache, prefix: str, tensors: dict[str, Tensor], rows: int, zeros: int) -> None:
    reach = tensors[f"{prefix}reach"]
    _check_numbers(f"{prefix}reach", reach, (len(ring.reach),), 1)
    _check_numbers(f"{prefix}written", tensors[f"{prefix}written"], (rows,), zeros)
    names = [f"{prefix}{name}" for name in LOST]
    for name in names if any(name in tensors for name in names) else []:
        _check_numbers(name, tensors[name], (rows, len(ring.reach)), zeros)
    ring.resize(reach.tolist())


def _check_shapes(part: HeadCache | OwnMemory, prefix: str, tensors: dict[str, Tensor], rows: int) -> None:
    held = part.stored() if isinstance(part, HeadCache) else part.tensors()
    for name, none in held.items():
        _check_shape(f"{prefix}{name}", tensors[f"{prefix}{name}"], [rows, *none.shape[1:]], none.dtype)


def _check_shape(name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if list(t.shape) != list(shape) or t.dtype != dtype:
        raise ValueError(f"{name} has shape {list(t.shape)} and dtype {t.dtype}; expected {list(shape)} of {dtype}")


def _check_numbers(name: str, t: Tensor, shape: tuple[int, ...], least: int) -> None:
    _check_shape(name, t, shape, torch.int64)
    if t.numel() and not least <= int(t.min()) <= int(t.max()) <= MOST:
        raise ValueError(f"{name} holds {int(t.min())} … {int(t.max())}; expected numbers from {least} to {MOST}")
