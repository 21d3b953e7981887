"""`vary` of a comparison: one run for each value of a setting, all other settings as in the file."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spanformer.cli.runfile import check_kind
from spanformer.core.fields import as_dict, build
from spanformer.train.config import RunConfig

UNCHANGED = "unchanged"
"""name of the run with the file's own values"""


def variations(config: RunConfig, entries: Sequence[str]) -> dict[str, RunConfig]:
    """The run as it is, and one for each value of each entry ("optim.span_lr = 0.01, 0.02") that differs, by a short
    name such as span_lr-0.02."""
    read = [_read(entry) for entry in entries]
    ends = Counter(key.rpartition(".")[2] for key, _ in read)
    found = {UNCHANGED: config}
    for key, values in read:
        last = key.rpartition(".")[2]
        for value in values:
            varied = _with(config, key, value)
            name = f"{last if ends[last] == 1 else file_name(key)}-{_said(value)}"
            if name in found and found[name] != varied:
                raise ValueError(f"vary has two values of {key} that are called {name}; expected names that differ")
            if varied != config:
                found[name] = varied
    return found


def file_name(text: str) -> str:
    """A folder's name: window(128) → window-128."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def _read(entry: str) -> tuple[str, list[Any]]:
    """The dotted key and the values, which are written as in a run file."""
    key, _, text = (part.strip() for part in entry.partition("="))
    try:
        values = tomllib.loads(f"values = [{text}]")
    except tomllib.TOMLDecodeError:
        values = {}
    if "." not in key or list(values) != ["values"] or not values["values"]:
        raise ValueError(
            f"vary is {entry!r}; expected a setting and its values, written as in a run file: optim.lr = 0.01, 0.02"
        )
    return key, values["values"]


def _with(config: RunConfig, key: str, value: Any) -> RunConfig:
    changed = as_dict(config)
    *sections, last = key.split(".")
    part = changed
    for section in sections:
        part = part.setdefault(section, {})
        if not isinstance(part, dict):
            raise ValueError(f"vary names {key}, and {section} is no section; expected a setting of a run file")
    part[last] = value
    return check_kind(build(RunConfig, changed, "vary"))


def _said(value: Any) -> str:
    """A value in a folder's name; of a path only its end."""
    if isinstance(value, list):
        return "-".join(map(_said, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return file_name(Path(text).name if "/" in text else text) or "none"
