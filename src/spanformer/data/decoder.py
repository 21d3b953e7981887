"""Ids to text one at a time: what is not yet a whole character waits for the ids that complete it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

UNREADABLE = "\ufffd"  # how decoding shows bytes that are no character, or not yet one
LONGEST = 3  # a token has at least one byte, and what lacks of a UTF-8 character's four bytes is at most three


class Decoder:
    """`add` the ids as they come and `finish` at the end: the texts they return, joined, are the text of all the ids.

    decode: takes some consecutive ids, and need not be additive: words bring the space between them.
    before: the ids that the first one follows.
    """

    def __init__(self, decode: Callable[[Iterable[int]], str], before: Iterable[int] = ()) -> None:
        self._decode = decode
        self._told = list(before)  # the last ids whose text was returned: what the next ones are joined to
        self._held: list[int] = []

    def add(self, token: int) -> str:
        self._held.append(token)
        text = self._new()
        if text.endswith(UNREADABLE) and len(self._held) <= LONGEST:
            return ""
        return self._tell(text)

    def finish(self) -> str:
        return self._tell(self._new()) if self._held else ""

    def _new(self) -> str:
        return self._decode([*self._told, *self._held])[len(self._decode(self._told)) :]

    def _tell(self, text: str) -> str:
        self._told, self._held = self._held, []
        return text


class ByteDecoder:
    """The same where an id is a byte."""

    def __init__(self, before: Iterable[int] = ()) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in before:
            self.add(token)

    def add(self, token: int) -> str:
        return self._utf8.decode(bytes([token]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)
