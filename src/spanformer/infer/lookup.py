"""Prompt lookup: guesses the next tokens where the text repeats itself; the model checks several in one step.

Saxena, Prompt Lookup Decoding, 2023, https://github.com/apoorvumang/prompt-lookup-decoding; checking guesses without
changing the output: Leviathan et al., 2022, https://arxiv.org/abs/2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence

LENGTHS = (16, 8, 4)
"""Lengths of the suffix to search for in the earlier text; the longest match is used."""
KEPT = 1 << 16
"""The lookup keeps at least this many of the last tokens, and at most twice as many."""


class Lookup:
    """Index of the last tokens of a text by n-gram. Adding a token takes constant time."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → position after its latest occurrence

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens[-KEPT:]:
            self._index()  # only now: this token follows the last n-grams
            self._tokens.append(token)
            if len(self._tokens) >= 2 * KEPT:
                self._forget()

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the latest earlier match of the suffix; none without a match. If fewer have
        followed so far, the text is periodic, and the period is repeated."""
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
