"""Names and texts of others, as they may be printed; the text of files."""

from __future__ import annotations

import glob
from pathlib import Path


def printable(text: object) -> str:
    """The text in one line that a terminal only shows: control characters, which could move the cursor, change the
    window's title or hide what follows, and halves of characters are written as Python escapes them."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def read_text(source: str) -> str:
    """The text of a file, of all files in a folder, or of a glob (** for all depths), in the order of their names."""
    path = Path(source)
    names = [source] if path.is_file() else sorted(map(str, path.rglob("*"))) if path.is_dir() else []
    names = names or sorted(glob.glob(source, recursive=True))
    files = [name for name in names if Path(name).is_file()]
    if not files:
        raise ValueError(f"{source} names no text; give a file, a folder or a glob")
    return "\n".join(Path(name).read_text(encoding="utf-8", errors="replace") for name in files)
