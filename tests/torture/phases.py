"""What a process was doing when it was killed: it notes its phase in a shared page, which survives it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

STARTING = "starting"
# One line for every phase: where its work is done. Functions are replaced in every module that imported them.
WHERE = {
    "preparing data": ("spanformer.data.prepare", "_write", "_put_in_place"),
    "training": ("spanformer.train.loop", "TrainingLoop._one_step"),
    "evaluating": ("spanformer.train.loop", "TrainingLoop._evaluate"),
    "saving a checkpoint": ("spanformer.train.loop", "TrainingLoop._save"),
    "reporting": ("spanformer.report.page", "write_report"),
    "fitting spans": ("spanformer.hf.plan", "FitRun.fit"),
    "saving a fitted model": ("spanformer.hf.saved", "save_fitted"),
    "saving a KV cache": ("spanformer.memory.cache", "Cache.save"),
}
PHASES = [STARTING, *WHERE]
_NOW, _COUNT = struct.Struct("<I"), struct.Struct("<I")
_SIZE = _NOW.size + _COUNT.size * len(PHASES)


class Page:
    """The phase of a process now, and how often it entered each."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        if new:
            path.write_bytes(bytes(_SIZE))
        descriptor = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(descriptor, _SIZE)
        os.close(descriptor)

    def now(self) -> str:
        return PHASES[_NOW.unpack_from(self._map, 0)[0]]

    def entered(self, phase: str) -> int:
        return _COUNT.unpack_from(self._map, self._at(phase))[0]

    def enter(self, phase: str) -> None:
        _COUNT.pack_into(self._map, self._at(phase), self.entered(phase) + 1)
        _NOW.pack_into(self._map, 0, PHASES.index(phase))

    def back_to(self, phase: str) -> None:
        _NOW.pack_into(self._map, 0, PHASES.index(phase))

    def _at(self, phase: str) -> int:
        return _NOW.size + _COUNT.size * PHASES.index(phase)


def watch_phases(path: Path, modules: tuple[str, ...]) -> None:
    """In the process to be watched: note phases in the page at `path`, and append the seconds of each to a log."""
    page = Page(path)
    for phase, (module, *names) in WHERE.items():
        if module.startswith(modules):
            for name in names:
                _wrap(importlib.import_module(module), name, phase, page, path.with_suffix(".seconds"))


def seconds_of(path: Path) -> dict[str, list[float]]:
    """How long each entry of a phase took, of a process that was watched."""
    found: dict[str, list[float]] = {}
    log = path.with_suffix(".seconds")
    for line in log.read_text().splitlines() if log.exists() else ():
        phase, _, seconds = line.rpartition("\t")
        found.setdefault(phase, []).append(float(seconds))
    return found


def _wrap(module: object, name: str, phase: str, page: Page, log: Path) -> None:
    *owner, last = name.split(".")
    holder = getattr(module, owner[0]) if owner else module
    real: Callable = getattr(holder, last)

    @functools.wraps(real)
    def watched(*args, **kwargs):
        before, began = page.now(), time.perf_counter()
        page.enter(phase)
        try:
            return real(*args, **kwargs)
        finally:
            page.back_to(before)
            with contextlib.suppress(OSError), log.open("a") as file:  # the length of files may be limited
                file.write(f"{phase}\t{time.perf_counter() - began}\n")

    setattr(holder, last, watched)
    if not owner:
        for other in [m for n, m in sys.modules.items() if n.startswith("spanformer")]:
            for key in [key for key, value in vars(other).items() if value is real]:
                setattr(other, key, watched)
