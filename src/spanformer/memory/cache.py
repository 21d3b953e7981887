"""What a language model keeps of the texts it is reading, so that it goes on from there: one `HeadCache` a layer.

Shapes: B batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from spanformer.core.files import replace_file
from spanformer.memory.head_cache import HeadCache
from spanformer.memory.source import Source

KIND, FORMAT = "spanformer cache", 3
MOST = 1 << 48  # a position in a text beyond all that was ever read, with the zeros before it


class Maker(Protocol):
    """The model that a cache belongs to."""

    config: Any
    """all that is not in its weights; its `repr` tells two apart"""

    def state_dict(self) -> dict[str, Tensor]: ...


class Reader(Maker, Protocol):
    """A model whose caches begin empty."""

    def cache(self, batch: int, *, slack: int = 0, bits: Literal[0, 8] = 0) -> Cache: ...


class Cache:
    """Made by `LM.cache`, filled by `LM.read`. Rows may stand at different places."""

    def __init__(self, maker: Maker, layers: Sequence[HeadCache], sources: Sequence[Source] = ()) -> None:
        """layers: all with one `place`. sources: of a decoder, what each layer keeps of the text it answers to."""
        assert all(layer.place is layers[0].place for layer in layers)
        self.maker, self.layers, self.sources = maker, list(layers), list(sources)

    @property
    def seen(self) -> Tensor:
        """[B] int64 on the CPU: how many tokens each row has read."""
        return self.layers[0].seen

    @property
    def batch(self) -> int:
        return self.layers[0].batch

    @property
    def slack(self) -> int:
        return self.layers[0].slack

    @property
    def bits(self) -> Literal[0, 8]:
        return self.layers[0].bits

    def bytes(self) -> int:
        """What is allocated for keys and values, exactly."""
        return sum(layer.bytes() for layer in self.layers)

    def full_bytes(self, context: int) -> int:
        """What full attention would keep for so many tokens of each row, in the model's dtype."""
        each = (len(layer.reach) * sum(layer.dims) * layer.dtype.itemsize for layer in self.layers)
        return self.batch * context * sum(each)

    def advance(self, tokens: int, lengths: Tensor | None = None) -> None:
        """Move every row on, by `tokens` or by lengths [B]."""
        self.layers[0].advance(tokens, lengths)

    def crop(self, lengths: Tensor) -> None:
        """Back to lengths [B] tokens, as if the rest had not been read. Once a ring has wrapped, at most `slack` tokens
        can be taken back."""
        lengths = lengths.to("cpu", torch.int64)
        for layer in self.layers:
            layer.check_crop(lengths)
        for layer in self.layers:
            layer.note_crop(lengths)
        self.layers[0].crop(lengths)

    def reorder(self, rows: Tensor) -> None:
        """Row b becomes what row rows[b] was, rows [B']; B' may be another number."""
        self.layers, self.sources = self._rows(rows), [source.rows(rows) for source in self.sources]

    def fork(self, copies: int) -> Cache:
        """Another cache with every row so many times, one after the other; the two know nothing of each other."""
        if copies < 1:
            raise ValueError(f"copies is {copies}; expected at least 1")
        rows = torch.arange(self.batch).repeat_interleave(copies)
        return Cache(self.maker, self._rows(rows), [source.rows(rows) for source in self.sources])

    def _rows(self, rows: Tensor) -> list[HeadCache]:
        if rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            raise ValueError(f"rows has shape {list(rows.shape)} and dtype {rows.dtype}; expected row numbers [B']")
        rows = rows.to("cpu", torch.int64)
        if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < self.batch):
            raise ValueError(f"rows holds {rows.tolist()}; expected numbers 0 … {self.batch - 1}")
        with torch.inference_mode(False):  # to be written to in or out of it
            place = self.layers[0].place[rows]
        return [layer.rows(rows, place) for layer in self.layers]

    def save(self, path: str | Path) -> None:
        """One safetensors file, with what it takes to go on reading; it also says which model made it. Written whole or
        not at all: beside `path` first, which it then takes."""
        if self.sources:
            raise ValueError("the cache of an encoder–decoder is not saved; read its source again instead")
        first = self.layers[0]
        tensors = {"place": first.place}
        for n, layer in enumerate(self.layers):
            tensors |= {f"{n}.{name}": t for name, t in layer.store.tensors().items()}
            tensors |= {f"{n}.reach": torch.tensor(layer.reach), f"{n}.written": layer.written}
            tensors |= {} if layer.oldest is None else {f"{n}.oldest": layer.oldest}
        about = {"kind": KIND, "format": FORMAT, "maker": digest(self.maker), "slack": self.slack, "bits": self.bits}
        about["sha256"] = _content(tensors)
        # a file's tensors may not share memory, and these do
        _write(Path(path), {name: t.clone() for name, t in tensors.items()}, {"spanformer": json.dumps(about)})

    @staticmethod
    def load(path: str | Path, model: Reader) -> Cache:
        """What `save` wrote, for the same model: another one's keys and values would mean nothing to it."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("spanformer", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as a saved cache ({error})") from error
        if not isinstance(about, dict) or about.get("kind") != KIND or about.get("format") != FORMAT:
            raise ValueError(f"{path} is not a cache saved by this version of spanformer")
        if about.get("maker") != digest(model):
            raise ValueError(f"{path} was saved by another model, or before this one was trained; read the text anew")
        if about.get("sha256") != _content(tensors):
            raise ValueError(f"{path} has another content than was written: the file is damaged; read the text anew")
        try:
            return _fill(model, about, tensors)
        except (KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} does not hold what its model needs ({error}); the file is damaged") from error


def _write(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    try:
        path.parent.stat()  # a folder that is not there is a mistake, and is not made
        with replace_file(path) as new:
            save_file(tensors, new, header)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OSError(f"{path} could not be saved ({why}); what was there before is untouched") from error


def _fill(model: Reader, about: dict, tensors: dict[str, Tensor]) -> Cache:
    slack, bits, place = about["slack"], about["bits"], tensors["place"]
    if type(slack) is not int or type(bits) is not int:
        raise ValueError(f"slack is {slack!r} and bits {bits!r}; expected whole numbers")
    # First one of no rows, which takes no memory: whatever the file says, it is held against what the file has.
    _check(model.cache(0, slack=slack, bits=bits), tensors)  # pyright: ignore[reportArgumentType]
    cache = model.cache(len(place), slack=slack, bits=bits)  # pyright: ignore[reportArgumentType]
    for n, layer in enumerate(cache.layers):
        layer.resize(tensors[f"{n}.reach"].tolist())
        for name, held in layer.store.tensors().items():
            held.copy_(tensors[f"{n}.{name}"])
        layer.written.copy_(tensors[f"{n}.written"])
        layer.oldest = tensors.get(f"{n}.oldest")
    cache.layers[0].place.copy_(place)
    return cache


def _check(empty: Cache, tensors: dict[str, Tensor]) -> None:
    """Whether the tensors are those of such a cache with some rows."""
    rows, zeros = len(tensors["place"]), empty.layers[0].zeros
    _check_numbers("place", tensors["place"], (rows,), zeros)
    for n, layer in enumerate(empty.layers):
        _check_numbers(f"{n}.reach", tensors[f"{n}.reach"], (len(layer.reach),), 1)
        _check_numbers(f"{n}.written", tensors[f"{n}.written"], (rows,), zeros)
        if (oldest := tensors.get(f"{n}.oldest")) is not None:
            _check_numbers(f"{n}.oldest", oldest, (rows, len(layer.reach)), 0)
        layer.resize(tensors[f"{n}.reach"].tolist())
        for name, none in layer.store.tensors().items():
            saved, shape = tensors[f"{n}.{name}"], [rows, *none.shape[1:]]
            _check_shape(f"{n}.{name}", saved, shape, none.dtype)


def _check_shape(name: str, t: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    if list(t.shape) != list(shape) or t.dtype != dtype:
        raise ValueError(f"{name} has shape {list(t.shape)} and dtype {t.dtype}; expected {list(shape)} of {dtype}")


def _check_numbers(name: str, t: Tensor, shape: tuple[int, ...], least: int) -> None:
    _check_shape(name, t, shape, torch.int64)
    if t.numel() and not least <= int(t.min()) <= int(t.max()) <= MOST:
        raise ValueError(f"{name} holds {int(t.min())} … {int(t.max())}; expected numbers from {least} to {MOST}")


def digest(model: Maker) -> str:
    """Of a model's configuration, and of all its names and weights."""
    return _digest(f"{model.config!r}\n", model.state_dict())


def _content(tensors: dict[str, Tensor]) -> str:
    return _digest("", tensors)


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
