"""The tasks by name, and their notation as a data source: recall(pairs=8, distance=256)."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import numpy as np

from spanformer.core.files import replace_file
from spanformer.data.tasks.base import Task
from spanformer.data.tasks.chase import Chase
from spanformer.data.tasks.copy import Copy
from spanformer.data.tasks.duplicate import Duplicate
from spanformer.data.tasks.needle import Needle
from spanformer.data.tasks.recall import Recall
from spanformer.data.tasks.words import Repeat, Reverse

TASKS: dict[str, type[Task]] = {task.name: task for task in (Recall, Copy, Duplicate, Needle, Chase, Repeat, Reverse)}
COUNTS = {"train": 20_000, "valid": 500, "test": 1000}
"""texts of each split"""


def parse_task(source: str) -> Task | None:
    """The task that a data source names, or None: every other source is a corpus or a path."""
    found = re.fullmatch(r"\s*([a-z]+)\s*(?:\((.*)\))?\s*", source, re.DOTALL)
    if found is None or found[1] not in TASKS:
        return None
    task, given = TASKS[found[1]], {}
    for argument in filter(None, (found[2] or "").split(",")):
        name, equals, value = (piece.strip() for piece in argument.partition("="))
        known = name in {field.name for field in fields(task)} and name not in given
        if not equals or not known or not re.fullmatch(r"\d{1,9}", value):
            raise ValueError(f"source is {source!r}; expected whole numbers by name, such as {written(task())}")
        given[name] = int(value)
    return task(**given)


def written(task: Task) -> str:
    """'recall(distance=64, nearest=0, pairs=8)', by which `parse_task` finds an equal task."""
    return f"{task.name}({', '.join(f'{field.name}={getattr(task, field.name)}' for field in fields(task))})"


def write(task: Task, folder: Path) -> dict[str, Path]:
    """One file of texts per split, one after the other, written if missing. No two splits have the same seed."""
    name = re.sub(r"\W+", "-", written(task)).strip("-")
    paths = {split: folder / f"{name}-{task.version}.{split}" for split in COUNTS}
    for seed, (split, count) in enumerate(COUNTS.items()):
        if not paths[split].exists():
            with replace_file(paths[split]) as new:
                new.write_bytes(task.draw(np.random.default_rng(seed), count).tobytes())
    return paths
