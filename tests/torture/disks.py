"""Full disks: a command ends with one sentence and loses nothing; with room again, it goes on or starts over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torture.checks import half_written, leftovers
from torture.kills import AFTER
from torture.processes import Ended, run
from torture.stage import Stage

PART = "full disks"
# A limit on every file's length stands for a full disk on any machine: bytes, by command.
LONGEST = {
    "train-only": (600, 4_000, 9_000, 40_000),
    "report": (1, 20_000, 60_000),
    "data": (100, 20_000),
    "fit": (300, 6_000, 30_000),
    "caches": (1, 5_000),
}
MOUNTED = ("64k", "100k", "150k", "250k")
CASES = sum(map(len, LONGEST.values())) + len(MOUNTED)


def torture(stage: Stage) -> None:
    for name, sizes in LONGEST.items():
        if name not in stage.seconds:
            stage.tally.skip(PART, f"{name}: transformers is not installed", len(sizes))
            continue
        for size in sizes:
            if not stage.tally.late():
                _short_files(stage, name, size)
    reason = why_no_mount(stage.root)
    if reason:
        stage.tally.skip(PART, reason, len(MOUNTED))
        return
    for size in MOUNTED:
        if not stage.tally.late():
            _small_disk(stage, size)


def _short_files(stage: Stage, name: str, size: int) -> None:
    case = stage.case()
    folder, again = case / "out", case / "out"
    ended = run(stage.commands(folder)[name], case / "screen", file_bytes=size)
    wrong = _ended_well(ended, folder)
    stage.tally.counts["refusals"] += ended.refused
    if name == "fit":
        again = case / "again"  # a fit begins anew
    ended = run(stage.commands(again)[name], case / "screen")
    stage.tally.counts["resumes"] += 1
    wrong += [f"with room again, it ended with {ended.code}: {ended.said[-500:]}"] if ended.code else []
    wrong += [] if wrong else AFTER[name](stage, again)
    stage.tally.counts["identical"] += not wrong
    stage.tally.case(PART, f"{name}, files of at most {size} bytes", wrong)
    stage.clear(case, wrong)


def _small_disk(stage: Stage, size: str) -> None:
    """A run on a file system of limited size, which then grows."""
    case = stage.case()
    with mounted(case / "disk", size) as disk:
        ended = run(stage.train_only(disk / "run"), case / "screen")
        wrong = _ended_well(ended, disk / "run")
        stage.tally.counts["refusals"] += ended.refused
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True, capture_output=True)
        ended = run(stage.train_only(disk / "run"), case / "screen")
        stage.tally.counts["resumes"] += 1
        wrong += [f"with room again, it ended with {ended.code}: {ended.said[-500:]}"] if ended.code else []
        wrong += [] if wrong else AFTER["train-only"](stage, disk)
    stage.tally.counts["identical"] += not wrong
    stage.tally.case(PART, f"a run on a disk of {size}", wrong)
    stage.clear(case, wrong)


def _ended_well(ended: Ended, folder: Path) -> list[str]:
    wrong = (
        [] if ended.refused or ended.code == 0 else [f"ended with {ended.code}, not one sentence: {ended.said[-600:]}"]
    )
    if folder.exists():
        wrong += half_written(folder) + leftovers(folder)
    return wrong


def why_no_mount(root: Path) -> str:
    """Why no small file system can be mounted here; '' if one can."""
    if os.geteuid() != 0:
        return "no small disk is mounted without root; files of limited length stand for it"
    try:
        with mounted(root / "try", "64k"):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        return f"a small disk cannot be mounted here ({said.decode(errors='replace').strip()})"


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    place.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "spanformer-torture", str(place)],
        check=True, capture_output=True,
    )  # fmt: skip
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)
