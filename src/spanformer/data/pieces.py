"""Byte ranges of plain, compressed and archived files, read in chunks."""

from __future__ import annotations

import codecs
import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
CONTINUATION = bytes(range(0x80, 0xC0))  # continuation bytes of a UTF-8 character, at most three
TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class Piece:
    """The bytes start … stop of a file or archive member that has `size` bytes unpacked."""

    path: Path
    member: str
    size: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.path}, {self.member}" if self.member else str(self.path)

    def __len__(self) -> int:
        return self.stop - self.start

    def chunks(self) -> Iterator[bytes]:
        at = self.start
        with open_stream(self.path, self.member) as stream:
            stream.seek(at)
            while at < self.stop:
                chunk = stream.read(min(CHUNK, self.stop - at))
                if not chunk:
                    raise ValueError(f"{self.name} ends after {at} bytes; expected {self.size}")
                at += len(chunk)
                yield chunk


def whole(path: Path, member: str = "") -> Piece:
    size = unpacked_size(path, member)
    return Piece(path, member, size, 0, size)


def limited(pieces: Iterable[Piece], limit: int) -> list[Piece]:
    """The pieces up to `limit` bytes in all."""
    kept = []
    for piece in pieces:
        take = min(len(piece), limit)
        if take:
            kept.append(replace(piece, stop=piece.start + take))
        limit -= take
    return kept


def texts(piece: Piece, chunks: Iterable[bytes]) -> Iterator[str]:
    """The piece's chunks as text. A character that the piece's boundary cuts is dropped on both sides."""
    held, at = b"", piece.start
    to_skip = 3 if piece.start else 0
    for chunk in chunks:
        if to_skip:
            kept = chunk[:to_skip].lstrip(CONTINUATION) + chunk[to_skip:]
            at += len(chunk) - len(kept)
            to_skip = max(to_skip - len(chunk), 0) if not kept else 0
            chunk = kept
        data = held + chunk
        nul = data.find(0)
        if nul >= 0:
            raise ValueError(f"{piece.name} is binary, with a NUL byte at offset {at + nul}; use byte tokens")
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError as error:
            raise _not_utf8(piece, data, at, error.start) from None
        at, held = at + used, data[used:]
        if text:
            yield text
    if held and piece.stop == piece.size:
        raise _not_utf8(piece, held, at, 0)


def _not_utf8(piece: Piece, data: bytes, at: int, wrong: int) -> ValueError:
    return ValueError(
        f"{piece.name} is not UTF-8: byte 0x{data[wrong]:02x} at offset {at + wrong}; convert it, or use byte tokens"
    )


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith((".zip", *TAR))


def members(path: Path) -> list[str]:
    """The files in an archive."""
    with reading(str(path)):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                return [info.filename for info in archive.infolist() if not info.is_dir()]
        with tarfile.open(path) as archive:
            return [info.name for info in archive if info.isfile()]


def unpacked_size(path: Path, member: str = "") -> int:
    """In bytes. A .gz does not store it (its trailer counts modulo 2³² and one part only), so it is decompressed."""
    if not member and path.suffix.lower() != ".gz":
        with reading(str(path)):
            return path.stat().st_size
    if path.name.lower().endswith(".zip"):
        with reading(str(path)), zipfile.ZipFile(path) as archive:
            return archive.getinfo(member).file_size
    if member:
        with reading(str(path)), tarfile.open(path) as archive:
            return archive.getmember(member).size
    with open_stream(path) as stream:
        return sum(map(len, iter(lambda: stream.read(CHUNK), b"")))


@contextmanager
def open_stream(path: Path, member: str = "") -> Iterator[IO[bytes]]:
    with reading(f"{path}, {member}" if member else str(path)), ExitStack() as stack:
        opened: Any  # a type checker does not accept all of these as IO[bytes], but all can read and seek
        if not member:
            opener = gzip.open if path.suffix.lower() == ".gz" else open
            opened = stack.enter_context(opener(path, "rb"))
        elif path.name.lower().endswith(".zip"):
            opened = stack.enter_context(stack.enter_context(zipfile.ZipFile(path)).open(member))
        else:
            opened = stack.enter_context(tarfile.open(path)).extractfile(member)
            assert opened is not None  # `members` lists regular files only
        yield opened


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn the exceptions of damaged and unreadable files into a ValueError with one sentence."""
    try:
        yield
    except (EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile) as error:
        raise ValueError(f"{name} is damaged or no such archive ({error}); get it again") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
