"""The config of a run: a TOML file or the defaults, overridden by command-line options."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from spanformer.cli.options import parse_options
from spanformer.core.fields import build
from spanformer.model.config import AttentionConfig

T = TypeVar("T")

LONGEST = 1 << 20  # bytes of a run file


def read_run(cls: type[T], program: str, arguments: list[str], known: Collection[str] = ()) -> T:
    """`runs/demo.toml --optim.lr 0.05`: options override the file, and the file overrides the dataclass defaults.
    A file may begin with `base = "other.toml"`, relative to its own folder, and then holds only the differences.

    known: paths of the shipped run files, for suggestions when a file does not exist.
    `--help` lists every field with its value after the file is read.
    """
    path = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if path is None:
        return check_kind(parse_options(cls, f"{program} [RUN.toml]", arguments, cls()))
    try:
        loaded = build(cls, _read(path, known), path)
    except RecursionError:
        raise ValueError(f"{path} is not a run file: its tables or lists are nested too deeply") from None
    return check_kind(parse_options(cls, f"{program} {path}", arguments[1:], loaded))


def check_kind(config: T) -> T:
    """Refuse a kind of attention beside a stack of kinds, which would silently win."""
    attention = getattr(getattr(config, "model", None), "attention", None)
    if isinstance(attention, AttentionConfig) and attention.stack and attention.kind != AttentionConfig.kind:
        raise ValueError(
            f"attention.kind is {attention.kind!r}, and attention.stack names the kind of each layer; empty the stack "
            "(stack = [], or --model.attention.stack without values) or leave the kind out"
        )
    return config


def _read(path: str, known: Collection[str], below: tuple[str, ...] = ()) -> dict[str, Any]:
    """A file's values, over the values of its `base`, if it has one."""
    if path in below:
        raise ValueError(
            f"{path} is its own base, through {', '.join(below)}; expected a chain of base files that ends"
        )
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
    except ValueError as error:  # TOMLDecodeError gives line and column; UnicodeDecodeError is a ValueError too
        raise ValueError(f"{path} is not TOML: {error}") from None


def _such_as(known: Collection[str]) -> str:
    return f", such as {', '.join(known)}" if known else ""
