"""`spanformer import-original CHECKPOINT.pt OUT`: convert a checkpoint of the adaptive-span paper's code."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.convert.original_settings import Settings
from spanformer.core.text import printable

if TYPE_CHECKING:
    from spanformer.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Settings):
    """Convert a checkpoint of the adaptive-span paper's code into a model folder.

    The checkpoint holds only weights; the options give the settings that it does not record.
    """

    checkpoint: tyro.conf.Positional[str]
    """the checkpoint file, as saved by the paper's code"""
    out: tyro.conf.Positional[str]
    """output folder of the model, for spanformer.load"""
    text: str = ""
    """train.txt of the training data, for the vocabulary; empty: the model handles token ids only"""


def run(options: ImportOptions) -> None:
    from spanformer.convert.original import import_original

    vocabulary = functools.partial(read_vocabulary, Path(options.text)) if options.text else None
    with Progress(transient=True) as report:
        report(f"converting {options.checkpoint}", 0, 0)
        summary = import_original(Path(options.checkpoint), Path(options.out), options, vocabulary)
    print(summary)
    out = printable(options.out)
    print(f"written to {out}; try  spanformer spans {out}")


def read_vocabulary(text: Path, config: ModelConfig) -> dict:
    """The words of train.txt with the ids of the paper's code: in order of first appearance or, with adaptive
    embeddings, by decreasing frequency; among equals, the last to appear comes first."""
    from spanformer.data.pieces import texts, whole
    from spanformer.data.vocab import Words, split_words

    piece = whole(text)
    counts: Counter[str] = Counter()
    for words in split_words(texts(piece, piece.chunks())):
        counts.update(words)
    found = list(counts)
    if config.embedding.cutoffs:
        found = sorted(reversed(found), key=lambda word: -counts[word])
    if len(found) != config.vocab:
        raise ValueError(
            f"--text {text} has {len(found):,} different words, <eos> included, and the model has {config.vocab:,}; "
            "expected the train.txt of its training data"
        )
    return Words(found).to_json()


IMPORT = Command(ImportOptions, run)
