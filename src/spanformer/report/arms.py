"""Runs that differ in nothing but their seed, together: an arm."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Group(NamedTuple):
    runs: list[int]
    """indices"""
    settings: dict[str, object]
    """of all its runs, by dotted names"""
    differ: list[str]
    """the names of those that other groups have otherwise"""

    def text(self, *, model: bool = True) -> list[str]:
        """What differs, in words. model: also the settings of the model."""
        known = [key for key in self.differ if key in self.settings and (model or not key.startswith("model."))]
        return [setting_text(key, self.settings[key]) for key in known]


def group_runs(configs: Sequence[dict], apart: Collection[str], named: Collection[str]) -> list[Group]:
    """The arms. apart: dotted names of settings that do not make another arm, such as ppo.seed; named: those that the
    arm's name says anyway."""
    groups: dict[str, tuple[list[int], dict[str, object]]] = {}
    for n, config in enumerate(configs):
        settings = {name: value for name, value in _flat(copy.deepcopy(config)).items() if name not in apart}
        groups.setdefault(json.dumps(settings, sort_keys=True), ([], settings))[0].append(n)
    each = list(groups.values())
    names = dict.fromkeys(name for _, settings in each for name in settings if name not in named)
    differ = [name for name in names if len({str(settings.get(name)) for _, settings in each}) > 1]
    return [Group(runs, settings, _without_details(differ)) for runs, settings in each]


def _without_details(differ: list[str]) -> list[str]:
    """If arms differ in their kind of attention, it says more than the numbers that go with it."""
    if "model.attention.kind" not in differ:
        return differ
    beside = ("model.attention.", "optim.span_lr")
    return [key for key in differ if key == "model.attention.kind" or not key.startswith(beside)]


def setting_text(key: str, value: object) -> str:
    return str(value) if key in ("model.attention.kind", "env.id") else f"{key.rsplit('.', 1)[-1]} {value}"


def _flat(config: dict, before: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in config.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found
