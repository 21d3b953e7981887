"""Text to memory-mapped ids: the result is cached under a name derived from everything it depends on.

A prepared folder holds train.bin, valid.bin and test.bin (ids, little-endian), vocab.json and meta.json. It is written
under another name and renamed, so it is either complete or absent. Of two processes that prepare the same text, the
second uses the first one's result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spanformer.core.files import hidden_folder, put_folder, remove_folder, sweep, sync
from spanformer.core.paths import expand_home
from spanformer.core.progress import Meter, OnProgress, silent
from spanformer.data.bpe import BPE, PackageMissing
from spanformer.data.config import DataConfig
from spanformer.data.corpora import SPLITS
from spanformer.data.images import Pixels
from spanformer.data.pieces import Piece, limited, texts
from spanformer.data.sources import Corpus, find
from spanformer.data.vocab import Bytes, Chars, Unit, Vocab, Words, from_json

FORMAT = 2  # part of every prepared folder's name: raise it when the files change for the same text


class Damaged(ValueError):
    """A prepared folder has changed since it was written."""


@dataclass(frozen=True)
class Split:
    ids: np.ndarray
    """[tokens] of the vocabulary's dtype, read-only, mapped from the file"""
    tokens: int
    units: int
    """bytes (of byte and bpe tokens), characters or words (<eos> is one): bits per unit are
    nats per token · tokens / units / ln 2"""
    sha256: str
    """of the file of ids: identifies the data whatever its name and folder"""


@dataclass(frozen=True)
class Prepared:
    folder: Path
    vocab: Vocab
    unit: Unit
    splits: dict[str, Split]
    """train, valid and test"""


def prepare(config: DataConfig, on_progress: OnProgress | None = None, *, vocab: Vocab | None = None) -> Prepared:
    """The tokens of a source, from the cache if it holds them.

    vocab: the vocabulary of a trained model, to use instead of one learned from this text.
    """
    if vocab is not None:
        config = replace(config, tokens=vocab.kind, vocab=0, tokenizer="")  # pyright: ignore[reportArgumentType]
    corpus = find(config)
    made_of = _made_of(config, corpus)
    if vocab is not None:
        made_of["given"] = hashlib.sha256(json.dumps(vocab.to_json(), sort_keys=True).encode()).hexdigest()
    key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "-", f"{corpus.name}-{config.tokens}-{key}")
    folder = config.cache_folder() / "tokens" / name
    if folder.exists():
        try:
            return load(folder)
        except Damaged as error:
            warnings.warn(f"{error}; preparing it again", stacklevel=2)
            with _writing(folder), contextlib.suppress(FileNotFoundError):  # another process was faster
                remove_folder(folder)
    with _writing(config.cache_folder()):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sweep(folder.parent)  # remove leftovers of killed processes: they may be large
        with hidden_folder(folder) as new:
            _write(new, config, corpus, vocab, on_progress or silent)
            _put_in_place(new, folder)
    return load(folder)


def load(folder: Path) -> Prepared:
    """Load a folder that `prepare` wrote; raises Damaged with the reason."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        vocab = from_json(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
        splits = {split: _map(folder / f"{split}.bin", vocab.dtype, **meta["splits"][split]) for split in SPLITS}
    except PackageMissing:
        raise  # the folder itself may be fine
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"the prepared folder {folder} is damaged ({error})") from error
    return Prepared(folder, vocab, vocab.unit, splits)


def _map(path: Path, dtype: np.dtype, tokens: int, units: int, sha256: str) -> Split:
    size = path.stat().st_size
    if size != tokens * dtype.itemsize or not tokens:
        raise ValueError(f"{path.name} has {size} bytes, expected {tokens * dtype.itemsize}")
    return Split(np.memmap(path, dtype, "r"), tokens, units, sha256)


def _made_of(config: DataConfig, corpus: Corpus) -> dict[str, Any]:
    """Everything that the result depends on, as plain JSON."""
    tokenizer = expand_home(config.tokenizer, "tokenizer") if config.tokenizer else None
    if tokenizer and not tokenizer.is_file():
        raise ValueError(f"tokenizer {config.tokenizer!r} does not exist; expected a JSON file of package tokenizers")
    return {
        "format": FORMAT,
        "corpus": corpus.identity,
        "tokens": config.tokens,
        "vocab": config.vocab,
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer else "",
        "limit": config.limit,
    }


def _write(new: Path, config: DataConfig, corpus: Corpus, vocab: Vocab | None, on_progress: OnProgress) -> None:
    splits = corpus.splits(on_progress)
    if config.limit:
        limits = {"train": config.limit, "valid": config.limit // 10, "test": config.limit // 10}
        splits = {split: limited(pieces, limits[split]) for split, pieces in splits.items()}
    own = None if corpus.vocab is None else corpus.vocab()
    if vocab is not None and own is not None and vocab.to_json() != own.to_json():
        raise ValueError(
            f"source {config.source!r} has {own.to_json()}; expected images as the model's, {vocab.to_json()}"
        )
    vocab = vocab or own or _vocab(config, splits["train"], on_progress)
    counts = {}
    for split, pieces in splits.items():
        meter = Meter(f"encoding {split}", sum(map(len, pieces)), on_progress)
        counts[split] = _encode(new / f"{split}.bin", vocab, pieces, meter)
        if not counts[split]["tokens"]:
            raise ValueError(f"source {config.source!r} leaves no tokens for the split {split!r}; expected more text")
    meta = {
        "format": FORMAT,
        "source": config.source,
        "tokens": config.tokens,
        "vocab": vocab.size,
        "dtype": vocab.dtype.name,
        "unit": vocab.unit,
        "limit": config.limit,
        "splits": counts,
    }
    for name, content in (("vocab.json", vocab.to_json()), ("meta.json", meta)):
        with (new / name).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1 if content is meta else None)
        sync(new / name)


def _vocab(config: DataConfig, train: Sequence[Piece], on_progress: OnProgress) -> Vocab:
    if config.tokens == "byte":
        return Bytes()
    if config.tokenizer:
        return BPE.load(expand_home(config.tokenizer, "tokenizer"))
    meter = Meter("learning the vocabulary", sum(map(len, train)), on_progress)
    kind = {"char": Chars, "word": Words, "bpe": BPE}[config.tokens]
    return kind.learn((texts(piece, meter.watch(piece.chunks())) for piece in train), config.vocab)


def _encode(path: Path, vocab: Vocab, pieces: Sequence[Piece], meter: Meter) -> dict[str, int | str]:
    """Write the ids; return the counts of tokens and units, and the digest."""
    tokens = text_bytes = 0
    digest = hashlib.sha256()

    def measured(parts: Iterator[str]) -> Iterator[str]:
        nonlocal text_bytes
        for part in parts:
            text_bytes += len(part.encode("utf-8"))
            yield part

    with path.open("wb") as file:
        for piece in pieces:
            parts: Any = meter.watch(piece.chunks())
            if not isinstance(vocab, Bytes | Pixels):
                parts = texts(piece, parts)
            if isinstance(vocab, BPE):
                parts = measured(parts)
            for ids in vocab.stream(parts):
                written = np.ascontiguousarray(ids, vocab.dtype).data
                file.write(written)
                digest.update(written)
                tokens += len(ids)
    sync(path)
    units = text_bytes if isinstance(vocab, BPE) else tokens
    return {"tokens": tokens, "units": units, "sha256": digest.hexdigest()}


def _put_in_place(new: Path, folder: Path) -> None:
    try:
        put_folder(new, folder)
    except OSError:
        if not folder.is_dir():
            raise
        # another process was first, with the same result


@contextlib.contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the cache {cache} cannot be written ({error.strerror or error}); "
            "choose another with --data.cache or SPANFORMER_CACHE"
        ) from error
