"""Input text of any length: a file or standard input, read in small parts and encoded by the model's vocabulary."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import numpy as np

from spanformer.data.pieces import CONTINUATION, Piece, open_stream, reading, texts, unpacked_size
from spanformer.data.vocab import Bytes, Vocab, from_json

STDIN = "-"
PART = 1 << 13  # bytes: small enough for a smooth progress bar


class TextFile:
    """A file that is read once. `done` and `size` are in bytes (size 0: unknown). `done` and `characters` count what
    was read so far."""

    def __init__(self, path: str) -> None:
        self.path, self.done, self.size, self.characters = path, 0, 0, 0
        self.name = "standard input" if path == STDIN else path
        if path == STDIN and (sys.stdin is None or sys.stdin.closed):
            raise ValueError("standard input is closed; pipe a text into it, or give a file")
        if path != STDIN:
            with reading(path):
                Path(path).stat()
            if Path(path).is_dir():
                raise ValueError(f"{path} is a folder; expected a file, or - for standard input")
            self.size = unpacked_size(Path(path)) if Path(path).is_file() else 0  # else maybe a pipe

    def parts(self, vocab: Vocab) -> Iterable:
        """Input of the vocabulary's `stream` and `prompt`: bytes, or their text, which must be UTF-8."""
        if isinstance(vocab, Bytes):
            return self._chunks()
        return texts(Piece(Path(self.name), "", 0, 0, 0), self._chunks())

    def _chunks(self) -> Iterator[bytes]:
        with ExitStack() as stack:
            stdin = self.path == STDIN
            stream = sys.stdin.buffer if stdin else stack.enter_context(open_stream(Path(self.path)))
            while chunk := stream.read(PART):
                yield chunk
                self.done += len(chunk)
                self.characters += len(chunk.translate(None, CONTINUATION))


def prompt_ids(file: TextFile | None, text: str, vocab: Vocab) -> Iterator[np.ndarray]:
    """Token ids of a file, if there is one, followed by a text."""
    return vocab.prompt(chain(file.parts(vocab) if file else (), [text] if text else ()))


def model_vocabulary(meta: dict, checkpoint: str) -> Vocab:
    if not isinstance(meta.get("vocab"), dict):
        raise ValueError(
            f"{checkpoint} has no vocabulary; expected one to encode text (in Python, spanformer.generate takes ids)"
        )
    return from_json(meta["vocab"])
