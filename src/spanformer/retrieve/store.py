"""A datastore that is read: memory-mapped shards of keys and tokens. Files are untrusted: sizes, checksums and ids are
checked, and nothing in them is code.

Shapes: N entries, D numbers of a stored key.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spanformer.ops.search import Codes
from spanformer.retrieve.header import KEY_BYTES, Header, Shard, read_header, read_shard, shard_folders
from spanformer.retrieve.pca import Pca, read_pca

PART = 8192  # keys that are turned into codes at a time
TORCH = {"float32": torch.float32, "float16": torch.float16, "int8": torch.int8}


@dataclass(frozen=True, eq=False)
class Part:
    """The entries of one shard."""

    first: int
    """number of its first entry"""
    about: Shard
    keys: Tensor
    """[n, D], memory-mapped"""
    scales: Tensor | None
    """[n] float32, of int8 keys"""
    tokens: np.ndarray
    """[n], memory-mapped"""

    @cached_property
    def codes(self) -> Codes:
        """8-bit codes to scan: the keys themselves if they are int8, else made from them, in memory."""
        if self.scales is not None:
            return Codes.of(self.keys[None], self.scales[None], "l2")
        codes = Codes(1, self.keys.shape[1], metric="l2", capacity=len(self.keys))
        for at in range(0, len(self.keys), PART):
            codes.append(self.keys[None, at : at + PART].float())
        return codes

    @cached_property
    def rows(self) -> Codes:
        """The keys to scan as they are stored: int8, or float32 (of float16 a copy, in memory)."""
        return self.codes if self.scales is not None else Codes.of(self.keys.float()[None], None, "l2")


class Store:
    """An open datastore; it does not see what is appended later."""

    def __init__(self, folder: str | Path, *, verify: bool = True) -> None:
        """verify: compare the checksum of every file, which reads all of it."""
        self.folder = Path(folder)
        self.header: Header = read_header(self.folder)
        self.pca: Pca | None = read_pca(self.folder, self.header)
        self.parts: list[Part] = []
        for path in shard_folders(self.folder):
            self.parts.append(_read(path, self.header, len(self), verify))

    def __len__(self) -> int:
        return self.parts[-1].first + self.parts[-1].about.count if self.parts else 0

    @property
    def error(self) -> float:
        """No stored key is farther than this from the key that the model made."""
        return max((part.about.error for part in self.parts), default=0.0)

    @cached_property
    def tokens(self) -> np.ndarray:
        """[N] int64: the token that followed each context, in the order of the text."""
        return np.concatenate([np.empty(0, np.int64), *(part.tokens.astype(np.int64) for part in self.parts)])

    def done(self, text: str) -> int:
        """How many entries of a text with this digest it holds, from the text's start without a gap."""
        held = sorted((part.about.start, part.about.count) for part in self.parts if part.about.text == text)
        done = 0
        for start, count in held:
            if start == done:
                done += count
        return done

    def bytes(self) -> int:
        return len(self) * self.header.entry_bytes


def _read(folder: Path, header: Header, first: int, verify: bool) -> Part:
    about = read_shard(folder)
    sizes = {"keys.bin": header.stored * KEY_BYTES[header.keys], "tokens.bin": header.token_bytes}
    if header.keys == "int8":
        sizes["scales.bin"] = 4
    if about.checksums.keys() != sizes.keys():
        raise ValueError(f"{folder} has files {sorted(about.checksums)}; expected {sorted(sizes)}: it is damaged")
    for name, each in sizes.items():
        path, expected = folder / name, each * about.count
        found = path.stat().st_size if path.is_file() else 0
        if found != expected:
            raise ValueError(
                f"{path} has {found:,} bytes; expected {expected:,} for {about.count:,} entries: the file is cut, or "
                "was appended to; build the datastore again"
            )
        if verify and _checksum(path) != about.checksums[name]:
            raise ValueError(f"{path} does not fit its checksum: it is damaged; build the datastore again")
    keys = _map(folder / "keys.bin", header.keys if header.keys == "int8" else f"<f{KEY_BYTES[header.keys]}")
    scales = torch.from_numpy(_map(folder / "scales.bin", "<f4")) if header.keys == "int8" else None
    tokens = _map(folder / "tokens.bin", f"<u{header.token_bytes}")
    if int(tokens.max()) >= header.vocab:
        raise ValueError(
            f"{folder / 'tokens.bin'} has the token {int(tokens.max())}; expected ids of the vocabulary, "
            f"0 … {header.vocab - 1}: it is damaged"
        )
    return Part(first, about, torch.from_numpy(keys).view(about.count, header.stored), scales, tokens)


def _map(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "c").view(np.ndarray)  # copy on write: torch warns of arrays that cannot be written


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while content := file.read(1 << 22):
            found = zlib.crc32(content, found)
    return found
