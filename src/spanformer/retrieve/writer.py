"""Writing a datastore: keys and tokens stream into a shard beside the others, which is renamed when it is complete.

One process writes at a time; a lock on the folder says who. What is not complete when the process ends is removed by
the next one. Shards end where windows end, so that a build can continue after its last shard.

Shapes: n entries, D numbers of a key.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from spanformer.core.files import hidden_folder, put_folder, sync
from spanformer.core.lock import lock_folder
from spanformer.ops.search import quantise
from spanformer.retrieve.header import NAME, Header, Maker, Shard, read_header, shard_folders, shard_name
from spanformer.retrieve.pca import Pca, read_pca

LARGEST = float(torch.finfo(torch.float16).max)
SHARD_ENTRIES = 65536


class Writer:
    """Adds entries to a datastore; `open_writer` makes one."""

    def __init__(self, folder: Path, header: Header, pca: Pca | None, number: int, entries: int) -> None:
        self.folder, self.header, self.pca, self.number, self.entries = folder, header, pca, number, entries
        self._open: _Open | None = None
        self._held = contextlib.ExitStack()

    def add(self, keys: Tensor, tokens: np.ndarray, text: str, start: int) -> None:
        """keys [n, D] of contexts, the tokens [n] that followed them; they are entries start … of a text with this
        digest. The entries of one call stay in one shard."""
        h = self.header
        if keys.ndim != 2 or keys.shape[1] != h.dim or tokens.shape != (len(keys),):
            raise ValueError(
                f"keys has shape {list(keys.shape)} and tokens {list(tokens.shape)}; expected [n, {h.dim}] and [n]"
            )
        if not len(keys):
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= h.vocab:
            raise ValueError(
                f"tokens has ids from {int(tokens.min())} to {int(tokens.max())}; expected ids of the vocabulary, "
                f"0 … {h.vocab - 1}"
            )
        if not bool(keys.isfinite().all()):
            bad = int((~keys.isfinite()).any(-1).sum())
            raise ValueError(
                f"{bad:,} of {len(keys):,} keys hold numbers that are not finite, from entry {start:,} of the text on; "
                "the model's weights are damaged, or its dtype overflows: build with float32"
            )
        stored, scales, error = self._store(keys.float())
        if self._open is None:
            self._open = self._held.enter_context(_shard(self.folder, self.number, text, start))
        self._open.add(stored, scales, tokens.astype(f"<u{h.token_bytes}"), error)
        if self._open.count >= self.entries:
            self.finish()

    def finish(self) -> None:
        """End the shard that is open, if any: from now on it is part of the datastore."""
        if self._open is not None:
            self._open.put(self.folder / shard_name(self.number))
            self._held.close()
            self._open, self.number = None, self.number + 1

    def discard(self) -> None:
        self._held.close()
        self._open = None

    def _store(self, keys: Tensor) -> tuple[np.ndarray, np.ndarray | None, float]:
        """The bytes of keys, their scales, and how far the farthest is from its key."""
        left = torch.zeros(len(keys), dtype=torch.float64) if self.pca is None else self.pca.left(keys)
        keys = keys if self.pca is None else self.pca.project(keys)
        scales = None
        if self.header.keys == "int8":
            stored, scales = quantise(keys)
            read = stored.double() * scales[:, None].double()
        elif self.header.keys == "float16":
            if float(keys.abs().max()) > LARGEST:
                raise ValueError(
                    f"a key holds {float(keys.abs().max()):,.0f}, above {LARGEST:,.0f}, the largest number of float16; "
                    "store keys as float32 or int8"
                )
            stored = keys.half()
            read = stored.double()
        else:
            stored = read = keys
        error = ((keys.double() - read).square().sum(-1) + left.square()).sqrt().max()
        return stored.contiguous().numpy(), None if scales is None else scales.numpy().astype("<f4"), float(error)


@contextlib.contextmanager
def open_writer(
    folder: Path, header: Header, pca: Pca | None = None, *, entries: int = SHARD_ENTRIES
) -> Iterator[Writer]:
    """A writer that appends to the datastore of `folder`, or makes one. Interrupted from the keyboard, it keeps what is
    written; after another error it keeps complete shards. entries: of a shard, about."""
    with _explained(folder), contextlib.ExitStack() as held:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(lock_folder(folder))
        if (folder / NAME).exists():
            check_same(folder, read_header(folder), header)
            pca = read_pca(folder, header)
        else:
            if pca is not None:
                pca.write(folder)
            header.write(folder)
        writer = Writer(folder, header, pca, len(shard_folders(folder)), entries)
        try:
            yield writer
        except KeyboardInterrupt:
            writer.finish()
            raise
        except BaseException:
            writer.discard()
            raise
        writer.finish()


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{folder} could not be written ({error.strerror or error}); shards that are complete are kept: make room "
            "or give write permission and run the same command again, or choose another folder"
        ) from error


def check_same(folder: Path, there: Header, wanted: Header) -> None:
    """Refuse to append keys of another model, or stored in another way."""
    check_maker(folder, there, wanted.maker)
    for name in ("dim", "vocab", "keys", "pca", "context"):
        if (old := getattr(there, name)) != (new := getattr(wanted, name)):
            raise ValueError(f"{folder} has {name} {old}; expected the same to append to it, and {new} is asked for")


def check_maker(folder: Path, header: Header, model: Maker) -> None:
    """Refuse a datastore that another model made. The width alone says nothing: distances between keys of two models
    mean nothing, and no error would show it."""
    made = header.maker
    named = f" ({made.name})" if made.name else ""
    for what, theirs, ours in (
        ("tokenizer", made.tokenizer, model.tokenizer),
        ("kind of key", made.key, model.key),
        ("dtype", made.dtype, model.dtype),
        ("set of weights, spans or settings", made.digest, model.digest),
    ):
        if theirs != ours:
            shown = f": {theirs!r}, and this model has {ours!r}" if len(theirs) < 60 and len(ours) < 60 else ""
            raise ValueError(
                f"{folder} was built by a model{named} with another {what}{shown}; build a datastore with this model"
            )


class _Open:
    """A shard that is being written, in a hidden folder."""

    def __init__(self, folder: Path, files: dict[str, IO[bytes]], text: str, start: int) -> None:
        self.folder, self.files, self.text, self.start = folder, files, text, start
        self.count, self.error, self.checksums = 0, 0.0, {"keys.bin": 0, "tokens.bin": 0}

    def add(self, keys: np.ndarray, scales: np.ndarray | None, tokens: np.ndarray, error: float) -> None:
        for name, numbers in (("keys.bin", keys), ("tokens.bin", tokens), ("scales.bin", scales)):
            if numbers is not None:
                content = numbers.tobytes()
                self.files[name].write(content)
                self.checksums[name] = zlib.crc32(content, self.checksums.get(name, 0))
        self.count += len(tokens)
        self.error = max(self.error, error)

    def put(self, path: Path) -> None:
        for name, file in self.files.items():
            file.close()
            if name not in self.checksums:
                (self.folder / name).unlink()
        Shard(self.count, self.checksums, self.error, self.text, self.start).write(self.folder)
        for name in (*self.checksums, "shard.json"):
            sync(self.folder / name)
        put_folder(self.folder, path)


@contextlib.contextmanager
def _shard(folder: Path, number: int, text: str, start: int) -> Iterator[_Open]:
    with hidden_folder(folder / shard_name(number)) as new, contextlib.ExitStack() as held:
        names = ("keys.bin", "tokens.bin", "scales.bin")
        yield _Open(new, {name: held.enter_context(open(new / name, "wb")) for name in names}, text, start)


def check_room(folder: Path, header: Header, entries: int) -> None:
    """Refuse a build that the disk cannot hold, before it begins."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, needed = shutil.disk_usage(there).free, entries * header.entry_bytes
    if needed > free:
        raise ValueError(
            f"{folder} would take {needed / 1e9:,.1f} GB for {entries:,} entries of {header.entry_bytes:,} bytes, and "
            f"{free / 1e9:,.1f} GB are free; choose another disk, --keys int8, --pca or less text"
        )
