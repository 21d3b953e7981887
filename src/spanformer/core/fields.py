"""Config dataclasses from plain dicts, as TOML and JSON hold them, and back.

A field whose type is a dataclass is a section. A key is the field's name, or the name in the annotation's metadata
(`Annotated[str, tyro.conf.arg(name="from")]`), so files and the command line use the same names.
A wrong value raises ValueError with one sentence that names the dotted key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "values that are true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("a string", "strings"),
    Path: ("a path", "paths"),
}
"""singular and plural name of a type's values, for errors"""


@dataclass(frozen=True)
class Entry:
    """One field of a config dataclass."""

    name: str
    """name of the attribute, which may differ from the key"""
    hint: Any
    """type without annotations"""
    notes: tuple[Any, ...]
    """its annotations"""
    required: bool

    @property
    def section(self) -> Any:
        """The dataclass, if the field is a section; else None."""
        return next((member for member in members(self.hint) if is_dataclass(member)), None)


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of a dataclass; missing keys take their defaults.

    where: the file of the values, for errors.
    """
    return _build(cls, values, "", where, [key for key, _ in walk(cls)])


def as_dict(instance: Any) -> dict[str, Any]:
    """The instance as JSON values, from which `build` makes an equal one."""
    return {key: _plain(getattr(instance, entry.name)) for key, entry in entries(type(instance)).items()}


def entries(cls: Any) -> dict[str, Entry]:
    """The fields by key, in order of definition."""
    annotated, bare = typing.get_type_hints(cls, include_extras=True), typing.get_type_hints(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if field.init:
            notes = getattr(annotated[field.name], "__metadata__", ())
            # recognise tyro's `arg` by its attribute `name`, so that files are read without importing tyro
            given = (name for note in notes if isinstance(name := getattr(note, "name", None), str))
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            found[next(given, field.name)] = Entry(field.name, bare[field.name], notes, required)
    return found


def walk(cls: Any, prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """(dotted key, entry) of every field; the fields of a section follow it."""
    for key, entry in entries(cls).items():
        yield prefix + key, entry
        if entry.section is not None:
            yield from walk(entry.section, f"{prefix}{key}.")


def members(hint: Any) -> tuple[Any, ...]:
    """The types of a union; for any other type, only itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def element(hint: Any) -> Any:
    """X of list[X] and tuple[X, ...]."""
    return typing.get_args(hint)[0]


def readable(hint: Any) -> bool:
    """Whether `build` can read this type."""
    for member in members(hint):
        origin, inside = typing.get_origin(member), typing.get_args(member)
        if origin is list or (origin is tuple and inside[1:] == (...,)):
            if not readable(inside[0]):
                return False
        elif not (member in WORDS or member is types.NoneType or origin is typing.Literal or is_dataclass(member)):
            return False
    return True


def expected(hint: Any, many: bool = False) -> str:
    """The name of this type's values in an error, singular or plural."""
    said = []
    for member in members(hint):
        if typing.get_origin(member) is typing.Literal:
            choices = typing.get_args(member)
            said.append(("some of " if many else "one of " if choices[1:] else "") + ", ".join(map(str, choices)))
        elif typing.get_origin(member) in (list, tuple):
            said.append(f"a list of {expected(element(member), many=True)}")
        elif is_dataclass(member):
            said.append(f"a table with the keys {', '.join(entries(member))}")
        elif member is not types.NoneType:
            said.append(WORDS[member][many])
    return " or ".join(said)


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """The dotted key that was most likely meant: the same name in another section, else a similar name in the same
    section, else a similar name anywhere. A name and its initials count as similar: learning_rate and lr."""
    known = list(known)
    section, _, name = wrong.rpartition(".")
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    beside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == section}
    short = [key for word, key in beside.items() if name == _initials(word) or word == _initials(name)]
    like = [beside[word] for word in difflib.get_close_matches(name, beside, 1)]
    far = difflib.get_close_matches(wrong, known, 1, 0.8)
    return next(iter([*elsewhere, *short, *like, *far]), None)


def _build(cls: type[T], values: Mapping[str, Any], prefix: str, where: str, keys: list[str]) -> T:
    """keys: all dotted keys, to suggest one for an unknown key."""
    known, place = entries(cls), f" in {where}" if where else ""
    for key in values:
        if key not in known:
            near = nearest(prefix + key, keys)
            meant = f"; did you mean {near}?" if near else ""
            raise ValueError(f"unknown key {prefix}{key}{place}{meant} (known: {', '.join(known)})")
    given = {}
    for key, entry in known.items():
        assert readable(entry.hint), f"{prefix}{key} is of type {entry.hint}, which no file can hold"
        if key not in values:
            if entry.required:
                raise ValueError(f"the key {prefix}{key}{place} is missing; expected {expected(entry.hint)}")
        elif entry.section is not None and isinstance(values[key], Mapping):
            given[entry.name] = _build(entry.section, values[key], f"{prefix}{key}.", where, keys)
        else:
            try:
                given[entry.name] = _read(entry.hint, values[key])
            except TypeError:
                wanted = expected(entry.hint)
                raise ValueError(f"{prefix}{key}{place} is {values[key]!r}; expected {wanted}") from None
    try:
        return cls(**given)
    except ValueError as error:  # from the dataclass's own check, which does not know its section and file
        at = (prefix.rstrip(".") + place).strip()
        raise ValueError(f"{error} ({at})" if at else str(error)) from error


def _read(hint: Any, value: Any) -> Any:
    """The value converted to its type, or TypeError. A float may be given as an int; an int may not be a bool."""
    origin = typing.get_origin(hint)
    if len(members(hint)) > 1:
        for member in members(hint):
            with contextlib.suppress(TypeError):
                return _read(member, value)
    elif origin is typing.Literal:
        if any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint)):
            return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        return origin(_read(element(hint), item) for item in value)
    elif hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (bool, int, str, types.NoneType) and type(value) is hint:
        return value
    raise TypeError


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return as_dict(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _initials(words: str) -> str:
    return "".join(word[0] for word in re.split(r"[-_]", words) if word)
