"""Byte-pair encoding with the package tokenizers, imported on first use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spanformer.data.vocab import Vocab, whole_words

if TYPE_CHECKING:
    import tokenizers

DEFAULT_SIZE = 8192
BATCH_TEXT = 1 << 14  # characters: small enough to split a part over the cores


class PackageMissing(ValueError):
    """The package tokenizers is not installed."""


class BPE(Vocab):
    """Tokens are pieces of words, learned from the training text (over bytes as in GPT-2, so nothing is unknown) or
    taken from a given tokenizer. Losses are reported per byte, so that tokenizers compare.

    Long texts are encoded in parts that end at a word boundary. With a tokenizer from `learn`, the parts do not change
    the ids; another tokenizer that treats the start of a text specially does so at the start of each part.
    """

    kind, unit = "bpe", "byte"

    def __init__(self, saved: dict[str, Any]) -> None:
        lib = package()
        try:
            self._tokenizer: tokenizers.Tokenizer = lib.Tokenizer.from_str(json.dumps(saved))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"the package tokenizers cannot load this tokenizer: {error}") from error
        ids = self._tokenizer.get_vocab().values()
        self.size = max(ids, default=-1) + 1  # not their number: a file may skip ids

    @classmethod
    def load(cls, path: Path) -> BPE:
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"tokenizer {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"tokenizer {path} cannot be used: {error}") from error

    @classmethod
    def learn(cls, documents: Iterable[Iterable[str]], size: int = 0) -> BPE:
        lib = package()
        tokenizer = lib.Tokenizer(lib.models.BPE())
        tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = lib.decoders.ByteLevel()
        trainer = lib.trainers.BpeTrainer(
            vocab_size=size or DEFAULT_SIZE,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator((text for document in documents for text in whole_words(document)), trainer)
        return cls(json.loads(tokenizer.to_str()))

    def stream(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        for text in whole_words(parts):
            batch = list(whole_words(text[i : i + BATCH_TEXT] for i in range(0, len(text), BATCH_TEXT)))
            for encoded in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoded.ids, self.dtype)

    def prompt(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
        return self.stream(map(_unicode, parts))

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}


def _unicode(text: str) -> str:
    """The package rejects lone surrogates, with which Python represents command-line bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 at its character {error.start + 1:,}; convert it") from None
    return text


def package():
    try:
        import tokenizers
    except ImportError:
        raise PackageMissing("tokens 'bpe' needs the package tokenizers; pip install 'spanformer[bpe]'") from None
    return tokenizers
