"""Options from a dataclass, parsed by tyro; errors are one plain sentence.

tyro parses and prints the help. If it fails, `_explain` walks the arguments again to find the wrong one: tyro's own
message repeats Python's ("invalid literal for int() with base 10") and comes in a box.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from spanformer.cli.command import HELP
from spanformer.core.fields import Entry, element, expected, members, nearest, readable, walk
from spanformer.core.text import printable

T = TypeVar("T")


def parse_options(options: type[T], program: str, arguments: list[str], default: T | None = None) -> T:
    """Parse the arguments into the dataclass. --help prints the help and exits; a mistake raises ValueError.

    default: instance with the values of options that are not given.
    """
    import tyro

    read: Any = functools.partial(tyro.cli, options, prog=printable(program))
    if default is not None:
        read = functools.partial(read, default=default)
    if HELP.intersection(arguments):
        read(args=["--help"])
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), _unwrapped():
            return read(args=arguments)
    except SystemExit as end:
        if not end.code:
            raise
        wrong = _explain(options, arguments) or _sentence(complaint.getvalue())
        raise ValueError(f"{wrong} (see {program} --help)") from None


def _explain(options: type, arguments: list[str]) -> str | None:
    """What is wrong with the first wrong argument; None if the arguments alone do not show it."""
    import tyro

    (positional,) = typing.get_args(tyro.conf.Positional[str])[1:]
    fields = [(key, entry) for key, entry in walk(options) if entry.section is None]
    if not all(readable(entry.hint) for _, entry in fields):
        return None
    known = {_spelling(key): (key, entry) for key, entry in fields if positional not in entry.notes}
    places = [(key, entry) for key, entry in fields if positional in entry.notes]
    given, loose = set(), []
    for option, words in _groups(arguments):
        if not option:
            loose += words
        elif named := _named(option, known):
            wrong, rest = _explain_value(_shown(named[0]), named[1], words)
            if wrong:
                return wrong
            given.add(named[0])
            loose += rest
        else:
            near = nearest(_spelling(option), known)
            return f"there is no option {option}" + (f"; did you mean {_shown(near)}?" if near else "")
    if loose and not places:
        return f"{loose[0]!r} belongs to no option"
    missing = [(_shown(key), entry) for key, entry in known.values() if entry.required and key not in given]
    missing += [(key.upper(), entry) for key, entry in places if entry.required and not loose]
    return f"{missing[0][0]} is missing; expected {expected(missing[0][1].hint)}" if missing else None


def _explain_value(option: str, entry: Entry, words: list[str]) -> tuple[str | None, list[str]]:
    """What is wrong with the values of an option (or None), and the words that it does not take."""
    if entry.hint is bool:
        if words and words[0].lower() in ("true", "false", "yes", "no", "1", "0"):
            section, dot, name = option[2:].rpartition(".")
            return f"{option} takes no value; write {option} or --{section}{dot}no-{name}", []
        return None, words
    lists = [member for member in members(entry.hint) if typing.get_origin(member) in (list, tuple)]
    if lists:
        inside = element(lists[0])
        fits = words == ["None"] or all(_fits(inside, word) for word in words)
        taken, wanted = words, expected(inside, many=True)
    else:
        fits, taken, wanted = bool(words) and _fits(entry.hint, words[0]), words[:1], expected(entry.hint)
    if not fits:
        return f"{option} {'is ' + repr(' '.join(taken)) if taken else 'has no value'}; expected {wanted}", []
    return None, words[len(taken) :]


def _fits(hint: Any, word: str) -> bool:
    """Whether a word can be parsed as this type."""
    for member in members(hint):
        if member is types.NoneType or member is bool or typing.get_origin(member) is typing.Literal:
            choices = {types.NoneType: (None,), bool: (True, False)}.get(member) or typing.get_args(member)
            if word in map(str, choices):
                return True
        else:
            with contextlib.suppress(ValueError):
                member(word)
                return True
    return False


def _groups(arguments: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(option, the words after it); the first pair has option "" and the words before any option."""
    option, words = "", []
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):  # not -0.5
            yield option, words
            option, equals, value = argument.partition("=")
            words = [value] if equals else []
        else:
            words.append(argument)
    yield option, words


def _named(option: str, known: dict[str, tuple[str, Entry]]) -> tuple[str, Entry] | None:
    """The field of an option, or of a flag turned off: --section.no-flag."""
    spelt = _spelling(option)
    if spelt in known:
        return known[spelt]
    section, dot, name = spelt.rpartition(".")
    off = known.get(section + dot + name.removeprefix("no_"))
    return off if off and off[1].hint is bool else None


def _spelling(option: str) -> str:
    """--optim.span-lr and optim.span_lr are the same option."""
    return option.lstrip("-").replace("-", "_")


def _shown(key: str) -> str:
    """As tyro's help writes it."""
    return "--" + key.replace("_", "-")


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Disable wrapping: a box as narrow as the terminal splits long words."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _sentence(box: str) -> str:
    """The message in tyro's box before its hints, on one line. Without box-drawing characters, the title also has a
    rule below it."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip().strip("│").strip()
        if re.fullmatch("[─-]+", text):
            parts.append([])
        elif not text.startswith(("╭", "╰")):
            parts[-1].append(text)
    message = parts[0] if "╭" in box else [*parts, []][1]
    text = " ".join(" ".join(message).split()).rstrip(".") or "these options could not be read"
    return re.sub(r"^Error parsing \w[\w.]*: ", "", text)  # the dataclass's own check already names the option
