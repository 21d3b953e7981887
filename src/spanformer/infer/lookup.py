"""Prompt look-up: guesses the next tokens where the text repeats itself, for the model to check several in one step.

Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; checking guesses so that
the outcome does not change: Leviathan et al., 2022, https://arxiv.org/abs/2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (16, 8, 4)
"""Of the last tokens, how many must have stood together before; the longest that did is believed."""
KEPT = 1 << 16
"""The look-up remembers at least this many of the last tokens, and at most twice as many."""


class Lookup:
    """The last tokens of a text, and after which of them it can go on. Adding a token takes constant time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # some tokens together → where the text went on, most recently

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens[-KEPT:]:
            self._index()  # only now: what the last tokens are followed by is this one
            self._tokens.append(token)
            if len(self._tokens) >= 2 * KEPT:
                self._forget()

    def guess(self, most: int) -> list[int]:
        """So many tokens as they followed the last time the text stood as it stands now; none if it never did. Where
        less has followed so far, the text goes round in a circle, and is taken to go on so."""
        for length in LENGTHS:
            at = self._after.get(self._last(length))
            if at is not None:
                period = len(self._tokens) - at
                return [self._tokens[at + n % period] for n in range(most)]
        return []

    def _last(self, length: int) -> tuple[int, ...]:
        return tuple(self._tokens[-length:]) if len(self._tokens) >= length else ()

    def _index(self) -> None:
        for length in LENGTHS:
            if last := self._last(length):
                self._after[last] = len(self._tokens)

    def _forget(self) -> None:
        kept, self._tokens, self._after = self._tokens[-KEPT:], [], {}
        self.add(kept)
