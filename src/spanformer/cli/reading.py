"""Text of any length for a model: a file or standard input, in small parts, in the tokens of its vocabulary."""

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
PART = 1 << 13  # bytes: small enough for a bar that moves


class TextFile:
    """A file that is read once. `done` and `size` are in bytes (a size of 0: nobody knows); so are `characters`, which
    are counted as it is read."""

    def __init__(self, path: str) -> None:
        self.path, self.done, self.size, self.characters = path, 0, 0, 0
        self.name = "standard input" if path == STDIN else path
        if path == STDIN and (sys.stdin is None or sys.stdin.closed):
            raise ValueError("standard input is closed; pipe a text into it, or name a file")
        if path != STDIN:
            with reading(path):
                Path(path).stat()
            if Path(path).is_dir():
                raise ValueError(f"{path} is a folder; expected a file, or - for standard input")
            self.size = unpacked_size(Path(path)) if Path(path).is_file() else 0  # what is no file may be a pipe

    def parts(self, vocab: Vocab) -> Iterable:
        """What the vocabulary's `stream` and `prompt` take: bytes, or the text that they are, which must be UTF-8."""
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
    """The ids of a file, if there is one, and of a text after it."""
    return vocab.prompt(chain(file.parts(vocab) if file else (), [text] if text else ()))


def model_vocabulary(meta: dict, checkpoint: str) -> Vocab:
    if not isinstance(meta.get("vocab"), dict):
        raise ValueError(
            f"{checkpoint} does not say which text its tokens stand for; from Python, spanformer.generate takes ids"
        )
    return from_json(meta["vocab"])
