"""Names and texts of others, as they may be printed."""

from __future__ import annotations


def printable(text: object) -> str:
    """The text in one line that a terminal only shows: control characters, which could move the cursor, change the
    window's title or hide what follows, and halves of characters are written as Python escapes them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))
