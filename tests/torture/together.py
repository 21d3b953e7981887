"""Two processes on one folder: the second run is refused and told of the first; other writers do not disturb each
other."""

from __future__ import annotations

import re
from pathlib import Path

from torture.checks import differences, half_written
from torture.kills import AFTER
from torture.processes import Child, run
from torture.stage import STEPS, Stage

PART = "two processes"
CASES = 6


def torture(stage: Stage) -> None:
    _second_run(stage, resume=True)
    _second_run(stage, resume=False)
    _changed_data(stage)
    for name in ("report", "data", "caches"):
        _side_by_side(stage, name)


def _second_run(stage: Stage, resume: bool) -> None:
    """Refused with the number of the process that has the folder, which ends as if it had been alone."""
    case = stage.case()
    long = stage.train_only(case / "run", steps=400)
    first = Child(long, case / "first")
    wrong = [] if first.reach("saving a checkpoint", 1, 0.05) else [f"the first run ended: {first.said()[-400:]}"]
    second = run(long if resume else [a for a in long if a != "--resume"], case / "second")
    named = str(first.pid) in re.findall(r"\d+", second.said)
    wrong += [] if second.refused else [f"the second run ended with {second.code}: {second.said[-400:]}"]
    wrong += [] if named or not second.refused else [f"process {first.pid} is not named: {second.said[-400:]}"]
    first.kill()
    stage.tally.kills[first.page.now()] += 1
    stage.tally.counts["refusals"] += second.refused
    wrong += half_written(case / "run")
    stage.tally.case(PART, f"a second run{' with --resume' if resume else ''}", wrong)
    stage.clear(case, wrong)


def _changed_data(stage: Stage) -> None:
    """The text changes between a run and its continuation, and keeps its size: refused, and the run is untouched."""
    case, text = stage.case(), stage.root / "text.txt"
    ended = run(stage.train_only(case / "run", steps=6), case / "screen")
    wrong = [] if ended.code == 0 else [f"ended with {ended.code}: {ended.said[-400:]}"]
    whole = text.read_bytes()
    try:
        text.write_bytes(whole.replace(b"a", b"\0").replace(b"b", b"a").replace(b"\0", b"b"))
        ended = run(stage.train_only(case / "run"), case / "screen")
    finally:
        text.write_bytes(whole)
    stage.tally.counts["refusals"] += ended.refused
    wrong += [] if ended.refused else [f"went on with other data, and ended with {ended.code}: {ended.said[-200:]}"]
    ended = run(stage.train_only(case / "run"), case / "screen")
    stage.tally.counts["resumes"] += 1
    found = [f"ended with {ended.code}: {ended.said[-400:]}"] if ended.code else []
    wrong += found or ([] if wrong else differences(case / "run", stage.straight / "run"))
    stage.tally.case(PART, f"other text after {STEPS // 2} steps", wrong)
    stage.clear(case, wrong)


def _side_by_side(stage: Stage, name: str) -> None:
    """Both do the same into one place, and both end well."""
    case = stage.case()
    folder: Path = case / "out"
    both = [Child(stage.commands(folder)[name], case / f"screen-{n}") for n in range(2)]
    ended = [child.wait() for child in both]
    wrong = [f"ended with {each.code}: {each.said[-400:]}" for each in ended if each.code]
    wrong += [] if wrong else AFTER[name](stage, folder)
    stage.tally.counts["identical"] += not wrong
    stage.tally.case(PART, f"{name} twice at once", wrong)
    stage.clear(case, wrong)
