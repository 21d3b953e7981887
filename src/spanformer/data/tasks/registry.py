"""The tasks by name, and their notation as a data source: recall(pairs=8, distance=256)."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

import numpy as np

from spanformer.core.files import replace_file
from spanformer.data.tasks.base import Task
from spanformer.data.tasks.chase import Chase
from spanformer.data.tasks.copy import Copy
from spanformer.data.tasks.duplicate import Duplicate
from spanformer.data.tasks.facts import Facts
from spanformer.data.tasks.needle import Needle
from spanformer.data.tasks.recall import Recall
from spanformer.data.tasks.words import Repeat, Reverse

TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Copy, Duplicate, Needle, Chase, Repeat, Reverse)}
Made = TypeVar("Made", Task, Facts)
COUNTS = {"train": 20_000, "valid": 500, "test": 1000}
"""texts of each split"""


def parse_task(source: str) -> Task | None:
    """The task that a data source names, or None: every other source is a corpus or a path."""
    return parse_call(source, TASKS)


def parse_facts(source: str) -> Facts | None:
    """The stream that a data source names, such as facts(every=1000, distance=2000), or None."""
    return parse_call(source, {Facts.name: Facts})


def parse_call(source: str, known: dict[str, type[Made]]) -> Made | None:
    """What a source such as 'recall(pairs=8)' names among `known`, or None."""
    found = re.fullmatch(r"\s*([a-z]+)\s*(?:\((.*)\))?\s*", source, re.DOTALL)
    if found is None or found[1] not in known:
        return None
    made, given = known[found[1]], {}
    for argument in filter(None, (found[2] or "").split(",")):
        name, equals, value = (piece.strip() for piece in argument.partition("="))
        expected = name in {field.name for field in fields(made)} and name not in given
        if not equals or not expected or not re.fullmatch(r"\d{1,9}", value):
            raise ValueError(f"source is {source!r}; expected whole numbers by name, such as {written(made())}")
        given[name] = int(value)
    return made(**given)


def written(made: Task | Facts) -> str:
    """'recall(distance=64, nearest=0, pairs=8)', by which `parse_call` finds an equal one."""
    return f"{made.name}({', '.join(f'{field.name}={getattr(made, field.name)}' for field in fields(made))})"


def write(task: Task, folder: Path) -> dict[str, Path]:
    """One file of texts per split, one after the other, written if missing. No two splits have the same seed."""
    name = re.sub(r"\W+", "-", written(task)).strip("-")
    paths = {split: folder / f"{name}-{task.version}.{split}" for split in COUNTS}
    for seed, (split, count) in enumerate(COUNTS.items()):
        if not paths[split].exists():
            with replace_file(paths[split]) as new:
                new.write_bytes(task.draw(np.random.default_rng(seed), count).tobytes())
    return paths
