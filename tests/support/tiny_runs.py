"""Training runs that take a second: a small text, a small model, everything due every few steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from spanformer.cli.runfile import _over
from spanformer.core.fields import build
from spanformer.train.config import RunConfig

TINY: dict[str, Any] = {
    "data": {"valid": 0.1},
    "model": {
        "dim": 16, "layers": 2, "heads": 2,
        "attention": {"max_span": 32, "ramp": 4.0, "init": 0.25, "penalty": 1e-4},
        "feedforward": {"dim": 32},
    },
    "optim": {"warmup": 3, "lr": 0.01, "schedule": "constant"},
    "train": {
        "batch": 4, "block": 16, "steps": 12, "eval_every": 3, "save_every": 3, "log_every": 1, "eval_tokens": 400,
        "threads": 1, "device": "cpu", "tensorboard": "off", "measure": False,
    },
}  # fmt: skip


def write_text(path: Path, letters: int = 6000, seed: int = 0) -> Path:
    """Words that come back, in lines; some of their letters take two bytes."""
    draw = random.Random(seed)
    words = ["".join(draw.choice("abcdefghijklmnoé") for _ in range(draw.randint(1, 6))) for _ in range(60)]
    text = ""
    while len(text) < letters:
        text += draw.choice(words) + ("\n" if draw.random() < 0.1 else " ")
    path.write_text(text, encoding="utf-8")
    return path


def values(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The values of a run file for a tiny run into folder/run; changes: by dotted key."""
    text = folder / "text.txt"
    if not text.exists():
        write_text(text)
    here = {"out": str(folder / "run"), "data": {"source": str(text), "cache": str(folder / "cache")}}
    found = _over(TINY, here)
    for key, value in (changes or {}).items():
        *sections, name = key.split(".")
        nested: dict[str, Any] = {name: value}
        for section in reversed(sections):
            nested = {section: nested}
        found = _over(found, nested)
    return found


def tiny(folder: Path, changes: dict[str, Any] | None = None) -> RunConfig:
    return build(RunConfig, values(folder, changes))


def options(folder: Path, changes: dict[str, Any] | None = None) -> list[str]:
    """The same as words of the command line."""
    return list(_words(values(folder, changes), ""))


def _words(found: dict[str, Any], prefix: str):
    for key, value in found.items():
        if isinstance(value, dict):
            yield from _words(value, f"{prefix}{key}.")
        elif isinstance(value, bool):
            yield f"--{prefix}{'' if value else 'no-'}{key}".replace("_", "-")
        elif isinstance(value, (list, tuple)):
            yield from (f"--{prefix}{key}".replace("_", "-"), *map(str, value))
        else:
            yield from (f"--{prefix}{key}".replace("_", "-"), str(value))
