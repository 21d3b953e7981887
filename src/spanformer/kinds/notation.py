"""The notation of attention kinds in run files and on the command line.

adaptive_span                       all heads of a layer
window(128)                         with its parameters, in order
big_bird(block=16, random=2)        or by name
6 window(64) + 2 adaptive_span      a mixture by head
Window(64) | Global([0])            a pattern of spanformer.attention.pattern, which begins with a capital letter
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import NamedTuple

from spanformer.kinds.registry import KINDS
from spanformer.kinds.spec import HeadSpec, Kind, Section

PATTERN = "pattern"
"""name of the kind whose heads are given by an expression"""
LARGEST = 1 << 31
"""no parameter is larger: tensors hold the product of two"""
Value = int | float | bool | str


class Part(NamedTuple):
    """One part of a mixture, as written."""

    heads: int | None
    """None: all of the layer's"""
    text: str


def split_parts(text: str) -> list[Part]:
    """'6 window(64) + 2 adaptive_span' → (6, 'window(64)'), (2, 'adaptive_span')."""
    found = (re.fullmatch(r"\s*(?:(\d+)\s+)?(.*?)\s*", part, re.DOTALL) for part in _split(text, "+"))
    return [Part(int(part[1]) if part[1] else None, part[2]) for part in found if part]


def is_pattern(text: str) -> bool:
    """Whether the text is a pattern: these begin with a capital letter, kinds with a small one."""
    return re.match(r"[\s(]*[A-Z]", text) is not None


def parse_layer(
    text: str, heads: int, where: str = "model.attention.stack", section: Section | None = None
) -> list[HeadSpec]:
    """The parts of a layer of this many heads. `where` names the option in errors."""
    section = section or Section()
    specs = []
    for count, part in split_parts(text):
        count = heads if count is None else count
        if is_pattern(part):
            specs.append(HeadSpec(PATTERN, count, text=part, section=section))
        else:
            kind, given = parse_kind(part, where)
            params = fill(kind, given, section, where)
            if int(params.get("max_span", 0)) > section.max_span:
                raise ValueError(
                    f"max_span in {where}, {text!r}, is {params['max_span']}; expected at most "
                    f"model.attention.max_span, {section.max_span}"
                )
            specs.append(HeadSpec(kind.name, count, {name: params[name] for name in kind.params}, section=section))
    if (total := sum(spec.heads for spec in specs)) != heads:
        raise ValueError(f"{where} is {text!r}, which has {total} heads; expected {heads}")
    return specs


def parse_kind(
    text: str, where: str, known: Mapping[str, Kind] = KINDS, *, assumed: bool = False
) -> tuple[Kind, dict[str, Value]]:
    """'big_bird(16, random=2)' → the kind and the parameters that were given, by name.

    assumed: also accept quantities that training determines and costs depend on, such as the mean of learned spans.
    """
    found = re.fullmatch(r"([a-z]\w*)(?:\((.*)\))?", text, re.DOTALL)
    if found is None or found[1] not in known:
        raise ValueError(f"{where} is {text!r}; {_meant(text, known)}")
    kind, inside = known[found[1]], (found[2] or "").strip()
    names = [*kind.params, *(kind.cost.assumed if assumed else ())]
    given: dict[str, Value] = {}
    for n, argument in enumerate(_split(inside, ",") if inside else []):
        name, equals, value = (piece.strip() for piece in argument.rpartition("="))
        if not equals and n < len(names) and len(given) == n:
            name = names[n]
        if name not in names or name in given:
            raise ValueError(f"{where} is {text!r}; expected {signature(kind, assumed=assumed)}")
        given[name] = _word(kind, value, name, text, where) or _value(value, name, text, where)
    return kind, given


def fill(kind: Kind, given: Mapping[str, Value], section: Section, where: str) -> dict[str, Value]:
    """Every parameter of a kind: as given, else its default, else as the section says; and what is assumed of
    training, which costs depend on."""
    inherited = {f.name: getattr(section, f.name) for f in fields(section)}
    defaults = {name: inherited[name] if value is None else value for name, value in kind.params.items()}
    filled = defaults | dict(kind.cost.assumed) | dict(given)
    for name, value in filled.items():
        if isinstance(value, str):
            continue
        known = defaults.get(name, 0)
        least = 0 if name in (*kind.zero, *kind.cost.assumed) or isinstance(known, bool) else 1
        whole = isinstance(known, float) or isinstance(value, int)
        if value < least or not whole:
            wanted = f"at least {least}" if whole else "a whole number"
            raise ValueError(f"{name} in {where}, {written(kind, filled)!r}, is {value}; expected {wanted}")
    return filled


def written(kind: Kind, params: Mapping[str, Value]) -> str:
    """'big_bird(block=16, window=3, tokens=1, random=2)'"""
    shown = [f"{name}={_shown(value)}" for name, value in params.items()]
    return f"{kind.name}({', '.join(shown)})" if shown else kind.name


def signature(kind: Kind, *, assumed: bool = False) -> str:
    """'big_bird(block=16, window=3, tokens=1, random=2)'; '…': as the [model.attention] section says."""
    known = dict(kind.params) | (dict(kind.cost.assumed) if assumed else {})
    shown = [f"{name}={'…' if value is None else _shown(value)}" for name, value in known.items()]
    return f"{kind.name}({', '.join(shown)})" if shown else f"{kind.name}, which takes no parameters"


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _word(kind: Kind, text: str, name: str, whole: str, where: str) -> str | None:
    """The value of a parameter that is a word."""
    if name not in kind.choices:
        return None
    if text not in kind.choices[name]:
        raise ValueError(f"{name} in {where}, {whole!r}, is {text!r}; expected one of {', '.join(kind.choices[name])}")
    return text


def _value(text: str, name: str, whole: str, where: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text) and len(text) < 12 and -LARGEST <= int(text) <= LARGEST:
        return int(text)
    if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", text):
        return float(text)
    raise ValueError(f"{name} in {where}, {whole!r}, is {text!r}; expected a number up to {LARGEST:,}, true or false")


def _meant(text: str, known: Mapping[str, Kind]) -> str:
    """Suggestion for a kind that does not exist."""
    name = re.match(r"[a-z_]\w*", text)
    if name and name[0] in known and ":" in text:
        return f"the notation has changed: write {name[0]}({', '.join(text.split(':')[1:])})"
    near = difflib.get_close_matches(name[0], known, 1) if name else []
    if near:
        return f"did you mean {near[0]}?"
    return (
        f"expected a kind ({', '.join(known)}), a mixture such as '6 window(64) + 2 adaptive_span', or a pattern such "
        "as 'Window(64) | Global([0])'"
    )


def _split(text: str, mark: str) -> list[str]:
    """Split at the marks that are outside brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == mark and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces
