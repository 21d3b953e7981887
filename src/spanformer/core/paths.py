"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path


def expand_home(path: str, name: str) -> Path:
    """The path with `~` or `~user` replaced by that home folder. name: the option, for errors."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user
        raise ValueError(
            f"{name} is {path!r}, and no user of that name has a home folder; write the full path"
        ) from None


def check_regular(path: Path, name: str) -> None:
    """Refuse a pipe or a device, which may never end. Files, folders and missing paths are accepted."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{name} {str(path)!r} is not a regular file; copy its content to one")
