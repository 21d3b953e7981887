"""What must hold of files, whatever was killed while they were written. Each returns what is wrong, or nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from spanformer.model.folder import faults
from spanformer.report.events import read_run
from support.same_runs import assert_same_checkpoint, assert_same_events

PNG_END = b"IEND\xaeB`\x82"


def leftovers(folder: Path) -> list[str]:
    """Hidden files, which only a writer at work may have; the lock of a run is one file, and none when it ended."""
    found = [path for path in folder.rglob(".*") if not any(up.name.startswith(".") for up in path.parents)]
    return [f"{path} is left over" for path in found]


def half_written(folder: Path) -> list[str]:
    """Everything in a folder of a run or a report that has its name but is not whole."""
    wrong = [fault for path in folder.glob("checkpoints/step-*") for fault in faults(path)]
    for path in folder.rglob("*.png"):
        if not _hidden(path, folder) and not path.read_bytes().endswith(PNG_END):
            wrong.append(f"{path} has {path.stat().st_size} bytes and is no whole picture")
    for path in folder.rglob("*.html"):
        if not _hidden(path, folder) and not path.read_text(errors="replace").rstrip().endswith("</html>"):
            wrong.append(f"{path} is no whole page")
    for path in folder.rglob("events.jsonl"):
        wrong += [f"{path} has a broken line" for line in path.read_bytes().split(b"\n")[:-1] if not _is_json(line)]
    return wrong


def differences(out: Path, straight: Path, *, same_notes: bool = True) -> list[str]:
    """Between a run that was disturbed and one that was not: events, losses and the last checkpoint, bit for bit.
    same_notes: no, where the run has something to tell, such as a damaged checkpoint."""
    try:
        mine, theirs = read_run(out), read_run(straight)
        assert_same_events(mine if same_notes else replace(mine, notes=theirs.notes), theirs)
        assert_same_checkpoint(out, straight)
    except (AssertionError, ValueError, OSError) as error:
        return [f"{out} differs from an undisturbed run: {type(error).__name__}: {' '.join(str(error).split())[:300]}"]
    return []


def other_files(folder: Path, straight: Path, passing: tuple[str, ...] = ()) -> list[str]:
    """Files by name and content; passing: names whose content may differ."""
    mine, theirs = _files(folder), _files(straight)
    wrong = [f"{folder / name} is there once only" for name in sorted(mine.keys() ^ theirs.keys())]
    same = mine.keys() & theirs.keys() - set(passing)
    return wrong + [f"{folder / name} has another content" for name in sorted(same) if mine[name] != theirs[name]]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
