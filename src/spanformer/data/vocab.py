"""Vocabularies of bytes, characters and words: text to ids and back. (BPE is in bpe.py.)

Encoding streams: a text may come in parts of any size, and the ids do not depend on the parts.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from spanformer.data.detokenizer import ByteDetokenizer, Detokenizer

Unit = Literal["byte", "char", "word", "dimension"]
UNKNOWN, END = "<unk>", "<eos>"


class Vocab(ABC):
    kind: ClassVar[str]
    """as in DataConfig.tokens"""
    unit: ClassVar[Unit]
    """unit of reported losses: bits per byte, character or dimension of an image, or perplexity per word"""
    size: int
    """V: ids are 0 … V − 1"""
    unknown: int | None = None
    """the id of everything outside the vocabulary"""

    @abstractmethod
    def stream(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of one document that comes in parts. (For `Bytes`, the parts are bytes.)"""

    @abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> str: ...

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of a text that continues after its last part. Raises ValueError for a token outside the vocabulary.
        (For `Bytes`, the parts may also be bytes.)"""
        return self.stream(parts)

    def detokenizer(self, before: Iterable[int] = ()) -> Detokenizer | ByteDetokenizer:
        """Decodes ids one at a time, returning text as soon as it is certain. before: the preceding ids."""
        return Detokenizer(self.decode, before)

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """A dict of plain JSON from which `from_json` makes an equal vocabulary."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """[T] int64 ids of a whole document."""
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return np.concatenate([np.empty(0, np.int64), *self.stream([text] if text else [])])

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype that holds every id, little-endian."""
        return np.dtype("u1" if self.size <= 1 << 8 else "<u2" if self.size <= 1 << 16 else "<i4")


class Bytes(Vocab):
    """A token is a byte."""

    kind, unit, size = "byte", "byte", 256

    def stream(self, parts: Iterable[bytes]) -> Iterator[np.ndarray]:
        for part in parts:
            yield np.frombuffer(part, np.uint8)

    def prompt(self, parts: Iterable[str] | Iterable[bytes]) -> Iterator[np.ndarray]:
        # Python represents command-line bytes that are not UTF-8 in this way.
        return self.stream(part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part for part in parts)

    def detokenizer(self, before: Iterable[int] = ()) -> ByteDetokenizer:
        return ByteDetokenizer(before)

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind}


class Chars(Vocab):
    """A token is a character. Ids are in code-point order; the last id is for every character not in `chars`."""

    kind, unit = "char", "char"

    def __init__(self, chars: str) -> None:
        self.chars = chars
        self.size = len(chars) + 1
        self.unknown = len(chars)
        self._ids = np.full(0x110000, self.unknown, self.dtype)  # of every code point
        self._ids[_code_points(chars)] = np.arange(len(chars))

    @classmethod
    def learn(cls, documents: Iterable[Iterable[str]], size: int = 0) -> Chars:
        """The characters of the documents; with a size, only the most frequent (ties by code point)."""
        counts = np.zeros(0x110000, np.int64)
        for document in documents:
            for part in document:
                seen = np.bincount(_code_points(part))
                counts[: len(seen)] += seen
        kept = np.flatnonzero(counts)
        if size:
            kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[: size - 1]])
        return cls("".join(map(chr, kept.tolist())))

    def stream(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        for part in parts:
            yield self._ids[_code_points(part)]

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        at = 0
        for part in parts:
            ids = self._ids[_code_points(part)]
            unknown = np.flatnonzero(ids == self.unknown)
            if len(unknown):
                wrong = part[unknown[0]]
                raise ValueError(
                    f"the vocabulary lacks the character {wrong!r} (U+{ord(wrong):04X}), at position "
                    f"{at + unknown[0] + 1:,} of the prompt; expected characters of the training text"
                )
            at += len(part)
            yield ids

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return "".join(self.chars[i] if i < len(self.chars) else "\ufffd" for i in map(int, ids))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "chars": self.chars}


class Words(Vocab):
    """A token is a word: `line.split() + ["<eos>"]` for every line, as WikiText is prepared.

    Ids are in order of falling frequency. `<unk>` is for every other word, also where the text itself contains it. An
    imported vocabulary may lack it, and then raises for other words.
    """

    kind, unit = "word", "word"

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.size = len(words)
        self._ids = {word: i for i, word in enumerate(words)}
        self.unknown = self._ids.get(UNKNOWN)

    @classmethod
    def learn(cls, documents: Iterable[Iterable[str]], size: int = 0) -> Words:
        """The words of the documents; with a size, only the most frequent. Ties go by first appearance."""
        counts: Counter[str] = Counter()
        for document in documents:
            for words in split_words(document):
                counts.update(words)
        ranked = [word for word, _ in counts.most_common()]  # a stable sort: ties keep the order of first appearance
        if UNKNOWN not in ranked[: size or None]:
            ranked = [*ranked[: size - 1 if size else None], UNKNOWN]
        return cls(ranked[: size or None])

    def stream(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        unknown = self.unknown
        for words in split_words(parts):
            if unknown is None:
                yield self._known(words)
            else:
                yield np.fromiter((self._ids.get(word, unknown) for word in words), self.dtype, len(words))

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        return map(self._known, split_words(parts, ends=False))

    def _known(self, words: list[str]) -> np.ndarray:
        for word in words:
            if word not in self._ids:
                instead = "" if self.unknown is None else f", or {UNKNOWN} in its place"
                raise ValueError(
                    f"the vocabulary lacks the word {word!r}; expected words of the training text{instead}"
                )
        return np.fromiter(map(self._ids.__getitem__, words), self.dtype, len(words))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        words = (self.words[int(i)] for i in ids)
        text = " ".join("\n" if word == END else word for word in words)
        return text.replace(" \n", "\n").replace("\n ", "\n")

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "words": self.words}


def from_json(saved: dict[str, Any]) -> Vocab:
    """The vocabulary from the result of `to_json`."""
    from spanformer.data.bpe import BPE  # which import this module
    from spanformer.data.images import pixels_from

    match saved:
        case {"kind": "byte"}:
            return Bytes()
        case {"kind": "char", "chars": str(chars)} if _all_differ(chars):
            return Chars(chars)
        case {"kind": "word", "words": list(words)} if _all_differ(words):
            return Words(words)
        case {"kind": "bpe", "tokenizer": dict(tokenizer)}:
            return BPE(tokenizer)
        case {"kind": "pixel"}:
            return pixels_from(saved)
    shown = json.dumps(saved)
    raise ValueError(f"{shown[:40]}{'…' * (len(shown) > 40)} is no saved vocabulary; expected the result of to_json")


def _all_differ(tokens: str | list[str]) -> bool:
    return all(isinstance(token, str) for token in tokens) and len(set(tokens)) == len(tokens)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


# White space by every definition, after a character that is white space by none.
_LAST_WORD_END = re.compile(r".*\S(?=[ \t\n\v\f\r])", re.DOTALL)


def whole_words(parts: Iterable[str]) -> Iterator[str]:
    """The same text, cut only at ends of words: after the word, before the white space that follows."""
    held = ""
    for part in parts:
        held += part
        if cut := _LAST_WORD_END.match(held):
            yield cut[0]
            held = held[cut.end() :]
    if held:
        yield held


def split_words(parts: Iterable[str], ends: bool = True) -> Iterator[list[str]]:
    """The words of one document, with an END after each line. A last line without a newline gets one too, unless `ends`
    is False (the document continues)."""
    last = "\n"
    for text in whole_words(parts):
        last = text[-1]
        yield text.replace("\n", f" {END} ").split()
    if ends and last != "\n":
        yield [END]
