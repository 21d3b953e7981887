"""The decoding loop: sample a token for every row, feed it to the model, repeat; guessed tokens go in together.

Shapes: B rows (texts), n tokens read in a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from spanformer.infer.sampling import Repeats, Sampling, choose
from spanformer.infer.text import Writer
from spanformer.memory.cache import Cache
from spanformer.model.lm import LM


class Guesser(Protocol):
    """Guesses the next tokens of a text: `Lookup`, or drafts by early exit."""

    def add(self, tokens: Sequence[int]) -> None:
        """These tokens follow."""
        ...

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens, possibly none."""
        ...


class Piece(NamedTuple):
    """One new token of one row."""

    row: int
    id: int
    text: str
    """text that became certain: "" while a character or stop string may be incomplete, more once it is resolved"""


@dataclass(frozen=True)
class Row:
    index: int
    ids: np.ndarray
    """[n] the last tokens of its prompt"""
    writer: Writer
    random: torch.Generator

    def write(self, token: int, last: bool) -> Piece:
        return Piece(self.index, token, self.writer.add(token) + (self.writer.finish() if last else ""))


class Chooser:
    """Samples the next token of every row, and keeps the state of earlier tokens that sampling depends on."""

    def __init__(
        self, rows: list[Row], sampling: Sampling, vocab: int, device: torch.device, guesser: Guesser | None, most: int
    ) -> None:  # fmt: skip
        """guesser: guesses up to `most` tokens per step, for a single row."""
        self.rows, self.sampling = rows, sampling
        self.most, self.guesser, self.repeats = most, guesser, None
        if sampling.repetition != 1:
            self.repeats = Repeats(len(rows), vocab, sampling.repetition_window, device)
        for n, row in enumerate(rows):
            self._remember(n, row.ids.tolist())

    def draw(self, logits: Tensor) -> Tensor:
        """[B] tokens from logits [B, V]."""
        seen = None if self.repeats is None else self.repeats.counts > 0
        tokens = choose(logits, self.sampling, seen, [row.random for row in self.rows])
        for n, token in enumerate(tokens.tolist()):
            self._remember(n, [token])
        return tokens

    def guess(self, most: int) -> list[int]:
        """Guessed next tokens, possibly none."""
        return [] if self.guesser is None else self.guesser.guess(min(most, self.most))

    def keep(self, rows: list[int]) -> None:
        self.rows = [self.rows[n] for n in rows]
        if self.repeats is not None:
            self.repeats.keep(rows)

    def _remember(self, row: int, tokens: list[int]) -> None:
        if self.repeats is not None:
            self.repeats.add(row, tokens)
        if self.guesser is not None:
            self.guesser.add(tokens)


def decode(model: LM, cache: Cache, logits: Tensor, chooser: Chooser, max_tokens: int) -> Iterator[Piece]:
    """logits [B, V]: for the tokens after the texts in the KV cache. Rows that have ended are removed from it.

    Guessed tokens (single row) are still sampled, with the same random numbers: a correct guess is already in the
    cache, and tokens after the first wrong guess are cropped from it.
    """
    following = logits[:, None]  # [B, n, V]: logits after the last token and after each guess
    guessed: list[int] = []
    made = right = 0
    while True:
        tokens = chooser.draw(following[:, right])
        made += 1
        ids = tokens.tolist()
        for row, token in zip(chooser.rows, ids, strict=True):
            yield row.write(token, made == max_tokens)
        going = [n for n, row in enumerate(chooser.rows) if not row.writer.stopped and made < max_tokens]
        if going and right < len(guessed) and ids[0] == guessed[right]:
            right += 1
            continue
        if right < len(guessed):
            cache.crop(cache.seen - (len(guessed) - right))
        if not going:
            return
        if len(going) < len(ids):
            cache.reorder(torch.tensor(going))
            chooser.keep(going)
        guessed, right = chooser.guess(max_tokens - made - 1), 0
        x = torch.cat([tokens[going, None], tokens.new_tensor([guessed] * len(going))], 1)
        found = model.decode(x, cache)
        assert found is not None
        following = found[..., : logits.shape[1]]
