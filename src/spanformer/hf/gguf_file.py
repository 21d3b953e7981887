"""GGUF files: read what stands before the tensors, and write a file with other values and tensors, copying the rest.

Tensors are bytes here, whatever their quantisation: only their rows can be put in another order. Everything is checked
against the size of the file before it is used. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from spanformer.core.files import replace_file
from spanformer.core.progress import OnProgress, silent

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY, UINT32, FLOAT32 = 7, 8, 9, 4, 6
F32 = 0
"""tensor type"""
CHUNK = 1 << 24


@dataclass(frozen=True)
class Value:
    """A value of the header: its type and its bytes after the type, as they stand in the file."""

    kind: int
    raw: bytes

    def get(self) -> Any:
        """A number, text, or a list of numbers. Lists of texts are not needed here and stay bytes."""
        if self.kind == STRING:
            return self.raw[8:].decode()
        if self.kind != ARRAY:
            return struct.unpack("<" + _SCALARS[self.kind], self.raw)[0]
        kind, count = struct.unpack_from("<IQ", self.raw)
        return self.raw if kind not in _SCALARS else list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.raw, 12))


def text(value: str) -> Value:
    return Value(STRING, struct.pack("<Q", len(value.encode())) + value.encode())


def number(value: float, kind: int) -> Value:
    return Value(kind, struct.pack("<" + _SCALARS[kind], value))


def bools(values: list[bool]) -> Value:
    return Value(ARRAY, struct.pack(f"<IQ{len(values)}?", BOOL, len(values), *values))


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """as in the file: the numbers of a row first"""
    kind: int
    begin: int = 0
    """in the file"""
    size: int = 0
    """bytes"""
    data: bytes | None = None
    """of a new tensor"""
    rows: tuple[int, ...] | None = None
    """the order in which rows are written; None: as they are"""


@dataclass(frozen=True)
class Gguf:
    path: Path
    values: dict[str, Value]
    tensors: list[TensorInfo] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values[name].get() if name in self.values else default


def read_gguf(path: Path) -> Gguf:
    """The header of a GGUF file of version 2 or 3."""
    try:
        with open(path, "rb") as file:
            reader = _Reader(file, path, path.stat().st_size)
            magic, version, tensors, count = struct.unpack("<4sIQQ", reader.take(24))
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"{path} is not a GGUF file of version 2 or 3; give another one")
            values = {}
            for _ in range(count):
                name = reader.text()
                values[name] = reader.value()
            infos = [reader.info() for _ in range(tensors)]
            align = values["general.alignment"].get() if "general.alignment" in values else 32
            start = _padded(file.tell(), align)
            return Gguf(path, values, [_placed(info, start, path, reader.size) for info in infos])
    except (OSError, struct.error, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as a GGUF file ({error}); it is damaged") from error


def write_gguf(path: Path, file: Gguf, on_progress: OnProgress = silent) -> None:
    """Write a file with these values and tensors, complete or not at all. Tensors without `data` come from
    file.path."""
    align = file.get("general.alignment", 32)
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(file.values))
    parts = [header]
    parts += [text(name).raw + struct.pack("<I", value.kind) + value.raw for name, value in file.values.items()]
    offset = 0
    for t in file.tensors:
        parts.append(text(t.name).raw + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.kind, offset))
        offset += _padded(t.size, align)
    head = b"".join(parts)
    with replace_file(path) as new, open(new, "wb") as out, open(file.path, "rb") as source:
        out.write(head.ljust(_padded(len(head), align), b"\0"))
        total = len(head) + sum(_padded(t.size, align) for t in file.tensors)
        for t in file.tensors:
            on_progress(f"writing {path.name}", out.tell(), total)
            _copy(t, source, out)
            out.write(bytes(_padded(t.size, align) - t.size))


def new_tensor(name: str, values: list[float]) -> TensorInfo:
    """[n] float32"""
    data = struct.pack(f"<{len(values)}f", *values)
    return TensorInfo(name, (len(values),), F32, size=len(data), data=data)


def _copy(t: TensorInfo, source: BinaryIO, out: BinaryIO) -> None:
    if t.data is not None:
        out.write(t.data)
        return
    source.seek(t.begin)
    if t.rows is not None:
        size = t.size // len(t.rows)
        held = source.read(t.size)
        out.write(b"".join(held[row * size : (row + 1) * size] for row in t.rows))
        return
    left = t.size
    while left:
        chunk = source.read(min(left, CHUNK))
        if not chunk:
            raise OSError(f"{t.name} ends too early")
        out.write(chunk)
        left -= len(chunk)


def _placed(info: TensorInfo, start: int, path: Path, size: int) -> TensorInfo:
    """With its place and its size in the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    known: dict[int, tuple[int, int]] = {int(kind): each for kind, each in GGML_QUANT_SIZES.items()}
    if info.kind not in known:
        names = ", ".join(each.name for each in GGMLQuantizationType)
        raise ValueError(f"{path}: {info.name} has quantisation {info.kind}, which is unknown here; expected {names}")
    numbers, held = known[info.kind]
    count = math.prod(info.shape)
    placed = replace(info, begin=start + info.begin, size=count // numbers * held)
    if count % numbers or placed.begin + placed.size > size:
        raise ValueError(f"{path}: {info.name} ends beyond the file of {size:,} bytes; the file is damaged")
    return placed


def _padded(size: int, align: int) -> int:
    return -(-size // align) * align


class _Reader:
    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size

    def take(self, count: int) -> bytes:
        """This many bytes: never more than the file has."""
        if count > self.size - self.file.tell():
            raise ValueError(f"{self.path} ends in the middle of its header; the file is damaged")
        return self.file.read(count)

    def unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def text(self) -> str:
        return self.take(self.unpack("Q")[0]).decode()

    def value(self) -> Value:
        (kind,) = self.unpack("I")
        begin = self.file.tell()
        self._skip(kind)
        end = self.file.tell()
        self.file.seek(begin)
        return Value(kind, self.take(end - begin))

    def info(self) -> TensorInfo:
        name, (axes,) = self.text(), self.unpack("I")
        shape = self.unpack(f"{min(axes, 5)}Q")
        kind, offset = self.unpack("IQ")
        return TensorInfo(name, shape, kind, offset)

    def _skip(self, kind: int) -> None:
        if kind in _SCALARS:
            self.take(struct.calcsize(_SCALARS[kind]))
        elif kind == STRING:
            self.take(self.unpack("Q")[0])
        elif kind == ARRAY:
            of, count = self.unpack("IQ")
            if of in _SCALARS:
                self.take(count * struct.calcsize(_SCALARS[of]))
            else:
                for _ in range(count):
                    self._skip(of)
        else:
            raise ValueError(f"{self.path} has a value of unknown type {kind} in its header; the file is damaged")
