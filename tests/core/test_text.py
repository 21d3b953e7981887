"""What a name of a file or a run looks like on a terminal."""

from __future__ import annotations

import pytest

from spanformer.core.text import printable

NAMES = {
    "plain text": ("out/demo run é 数", "out/demo run é 数"),
    "a colour": ("\x1b[31mred", "\\x1b[31mred"),
    "a window title": ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
    "a second line": ("a\nb\r", "a\\nb\\r"),
    "C1 controls": ("\x9b2J", "\\x9b2J"),
    "text that runs backwards": ("\u202egnp", "\\u202egnp"),
    "bytes that are no UTF-8": (b"\xff".decode(errors="surrogateescape"), "\\udcff"),
}


@pytest.mark.parametrize("text, shown", NAMES.values(), ids=NAMES)
def test_printable_escapes_what_is_not_shown(text: str, shown: str) -> None:
    assert printable(text) == shown and printable(text).isprintable()
