"""A run: a TOML file, or the defaults, and options of the command line over it."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from spanformer.cli.options import parse_options
from spanformer.model.fields import build

T = TypeVar("T")

LONGEST = 1 << 20  # bytes of a run file


def read_run(cls: type[T], program: str, arguments: list[str], known: Collection[str] = ()) -> T:
    """`runs/demo.toml --optim.lr 0.05`: the file's values over the defaults of the dataclass, the options over both.
    A file may begin with `base = "other.toml"`, a path beside its own, and then says only what differs.

    known: the run files that are shipped, as they are written on the command line; one of them may have been meant.
    `--help` lists every field with the value it has after the file is read.
    """
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if path is None:
        return parse_options(cls, f"{program} [RUN.toml]", arguments, cls())
    try:
        loaded = build(cls, _read(path, known), path)
    except RecursionError:
        raise ValueError(f"{path} is not a run file: its tables or lists are nested too deeply") from None
    return parse_options(cls, f"{program} {path}", arguments[1:], loaded)


def _read(path: str, known: Collection[str], below: tuple[str, ...] = ()) -> dict[str, Any]:
    """A file's values, over those of the file it names as its `base`, if it names one."""
    if path in below:
        raise ValueError(f"{path} is its own base, by way of {', '.join(below)}")
    values = _toml(path, known)
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ValueError(f"base in {path} is {base!r}; expected the path of another run file")
    return _over(_read(str(Path(path).parent / base), known, (*below, path)), values)


def _over(under: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(under[key], value) for key, value in values.items()
            if isinstance(value, dict) and isinstance(under.get(key), dict)}  # fmt: skip
    return under | values | both


def _toml(path: str, known: Collection[str]) -> dict[str, Any]:
    if not Path(path).exists():
        by_stem = {Path(name).stem: name for name in known}
        near = difflib.get_close_matches(Path(path).stem, by_stem, 1)
        meant = f" did you mean {by_stem[near[0]]}?" if near else f" expected a TOML file{_such_as(known)}"
        raise ValueError(f"{path} does not exist;{meant}")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder; expected a TOML file{_such_as(known)}")
    try:
        with open(path, "rb") as file:  # a device has no end
            content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} bytes")
        return tomllib.loads(content.decode())
    except ValueError as error:  # TOMLDecodeError says line and column; UnicodeDecodeError is one too
        raise ValueError(f"{path} is not TOML: {error}") from None


def _such_as(known: Collection[str]) -> str:
    return f", such as {', '.join(known)}" if known else ""
