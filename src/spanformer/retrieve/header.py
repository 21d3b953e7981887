"""What a datastore says of itself: the files store.json and shard.json, read as untrusted.

    store.json              this header
    pca.bin                 with PCA: float32 [1 + stored, dim], the mean and the directions
    shard-000000/           keys.bin, tokens.bin, with int8 keys scales.bin; shard.json has their sizes and checksums
    fit.json                temperature and λ, from `spanformer datastore fit`

Numbers are little-endian. A shard is written aside and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from spanformer.core.checks import finite_number, whole_number
from spanformer.core.files import write_text

FORMAT = 1
KIND = "spanformer datastore"
NAME = "store.json"
SHARD = "shard.json"
MOST = 1 << 40  # entries, and numbers of a key: more is a damaged file
Keys = Literal["float32", "float16", "int8"]
KEY_BYTES = {"float32": 4, "float16": 2, "int8": 1}
UNKNOWN = ("digest", "key", "dtype", "tokenizer")


@dataclass(frozen=True)
class Maker:
    """The model whose keys a datastore holds. All four must agree: keys of another model are no neighbours."""

    digest: str
    """of the configuration, names and values of its weights, spans included"""
    key: str
    """what the key is"""
    dtype: str
    """in which it was computed"""
    tokenizer: str
    """digest of the vocabulary"""
    name: str = ""
    """for messages only"""


@dataclass(frozen=True)
class Header:
    dim: int
    """D: numbers of a key as the model makes it"""
    vocab: int
    maker: Maker
    keys: Keys = "int8"
    """how keys are stored"""
    pca: int = 0
    """directions that are stored of a key; 0: the key itself"""
    context: int = 0
    """tokens of a window that the model read at a time"""

    @property
    def stored(self) -> int:
        """numbers of a stored key"""
        return self.pca or self.dim

    @property
    def token_bytes(self) -> int:
        return 2 if self.vocab <= 1 << 16 else 4

    @property
    def entry_bytes(self) -> int:
        """Of one entry on disk."""
        return self.stored * KEY_BYTES[self.keys] + 4 * (self.keys == "int8") + self.token_bytes

    def __post_init__(self) -> None:
        whole_number("dim", self.dim, 1, MOST)
        whole_number("vocab", self.vocab, 1, 1 << 32)
        whole_number("pca", self.pca, 0, self.dim)
        whole_number("context", self.context)
        if self.keys not in get_args(Keys):
            raise ValueError(f"keys is {self.keys!r}; expected one of {', '.join(get_args(Keys))}")

    def write(self, folder: Path) -> None:
        said = {"kind": KIND, "format": FORMAT, "byte_order": "little", **asdict(self)}
        write_text(folder / NAME, json.dumps(said, indent=2) + "\n")


def read_header(folder: Path) -> Header:
    if not (folder / NAME).is_file():
        raise ValueError(f"{folder} is no datastore: it has no {NAME}; make one with spanformer datastore build")
    said = read_json(folder / NAME)
    if said.get("kind") != KIND:
        raise ValueError(f'{folder / NAME} has kind {said.get("kind")!r}; expected "{KIND}"')
    if said.get("format") != FORMAT:
        raise ValueError(f"{folder} has format {said.get('format')!r}; this version reads {FORMAT}: build it again")
    if said.get("byte_order") != "little" or sys.byteorder != "little":
        raise ValueError(
            f"{folder} has byte order {said.get('byte_order')!r} and this machine {sys.byteorder!r}; expected 'little' "
            "of both: build it again on this machine"
        )
    maker = said.get("maker")
    if not isinstance(maker, dict) or not all(isinstance(maker.get(name), str) for name in (*UNKNOWN, "name")):
        raise ValueError(f"{folder / NAME} does not say which model made it; build it again")
    names = ("dim", "vocab", "keys", "pca", "context")
    if missing := [name for name in names if name not in said]:
        raise ValueError(f"{folder / NAME} has no {missing[0]}; the file is damaged")
    try:
        return Header(maker=Maker(**{name: maker[name] for name in (*UNKNOWN, "name")}), **{n: said[n] for n in names})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / NAME}: {error}") from None


@dataclass(frozen=True)
class Shard:
    """What shard.json says."""

    count: int
    checksums: dict[str, int]
    """CRC-32 of each file"""
    error: float
    """the largest ‖k − stored k‖ of its keys"""
    text: str
    """digest of the tokens that it was made from"""
    start: int
    """its first entry predicts token start + 1 of them"""

    def write(self, folder: Path) -> None:
        (folder / SHARD).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def read_shard(folder: Path) -> Shard:
    said = read_json(folder / SHARD)
    try:
        sums = said["checksums"]
        if not isinstance(sums, dict) or not isinstance(said["text"], str):
            raise ValueError("its checksums or its text are no such thing")
        return Shard(
            whole_number("count", said["count"], 1, MOST),
            {str(name): whole_number(name, value, 0, (1 << 32) - 1) for name, value in sums.items()},
            finite_number("error", said["error"]),
            said["text"],
            whole_number("start", said["start"], 0, MOST),
        )
    except KeyError as missing:
        raise ValueError(f"{folder / SHARD} has no {missing}; the file is damaged") from None
    except ValueError as error:
        raise ValueError(f"{folder / SHARD} is damaged: {error}") from None


def read_json(path: Path) -> dict:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} could not be read: {error}") from None
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; the datastore is damaged: build it again") from None
    if not isinstance(said, dict):
        raise ValueError(f"{path} holds no object; the file is damaged")
    return said


def shard_folders(folder: Path) -> list[Path]:
    """In order; a number that is missing is refused."""
    found = sorted(path for path in folder.glob("shard-*") if path.is_dir())
    for n, path in enumerate(found):
        if path.name != shard_name(n):
            raise ValueError(f"{folder} has {path.name} where {shard_name(n)} is expected; a shard is missing")
    return found


def shard_name(number: int) -> str:
    return f"shard-{number:06}"
