"""Ids to text one at a time: bytes of an incomplete character are held back until later ids complete it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

UNREADABLE = "\ufffd"  # decoding result for bytes that are not, or not yet, a character
LONGEST = 3  # tokens: each has at least one byte, and a UTF-8 character of four bytes lacks at most three


class Detokenizer:
    """Call `add` for each id and `finish` at the end: the texts they return, joined, are the text of all the ids.

    decode: maps consecutive ids to text and need not be additive: words are joined by spaces.
    before: the ids before the first one.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], before: Iterable[int] = ()) -> None:
        self._decode = decode
        self._shown = list(before)  # the last ids whose text was returned: context for the next ones
        self._held: list[int] = []

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._new()
        if text.endswith(UNREADABLE) and len(self._held) <= LONGEST:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._new()) if self._held else ""

    def _new(self) -> str:
        return self._decode([*self._shown, *self._held])[len(self._decode(self._shown)) :]

    def _show(self, text: str) -> str:
        self._shown, self._held = self._held, []
        return text


class ByteDetokenizer:
    """A Detokenizer for byte tokens."""

    def __init__(self, before: Iterable[int] = ()) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in before:
            self.add(token)

    def add(self, token: int) -> str:
        return self._utf8.decode(bytes([token]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)
