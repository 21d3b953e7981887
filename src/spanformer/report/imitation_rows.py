"""The recorded rows of learning from episodes: one run, and the runs of one arm with different seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spanformer.core.events import FILE, ResumeEvent
from spanformer.core.policy_events import AskedEvent, ImitateEvent, ImitationStartEvent
from spanformer.core.ranks import spearman
from spanformer.report.arms import group_runs
from spanformer.report.rows import Line

RUN_ONLY = {"out", "resume", "imitate.seed", "imitate.threads", "imitate.tensorboard", "imitate.save_every",
            "imitate.keep", "imitate.eval_episodes", "imitate.log_every"}  # fmt: skip
"""settings that do not make another arm"""
NAMED = {"imitate.method", "imitate.top", "imitate.targets"}
"""settings that the name of an arm says"""


@dataclass(frozen=True)
class ImitationRows:
    """One run."""

    name: str
    env: str
    parameters: int
    config: dict
    returns: tuple[float, float]
    """smallest and largest of the data"""
    steps: list[Line]
    asked: list[AskedEvent]


def is_imitation(path: Path) -> bool:
    """Whether the first row of a run is that of learning from recorded episodes."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        return False
    with open(file, encoding="utf-8") as stream:
        return f'"event": "{ImitationStartEvent.kind}"' in stream.readline()


def read_imitation(path: Path) -> ImitationRows:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not is_imitation(path):
        raise ValueError(f"{file} does not begin a run of `rl imitate`; expected the folder of one")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = [Line(json.loads(line), f"{file}, line {n}") for n, line in enumerate(lines, 1)]
    kept: dict[tuple, Line] = {}
    for row in rows[1:]:
        kind, step = row.text("event"), row.whole("step")
        if kind == ResumeEvent.kind:  # later rows are void: these steps are repeated
            kept = {key: old for key, old in kept.items() if key[1] <= step}
        key = (kind, step, row.record.get("target"))
        kept.pop(key, None)
        kept[key] = row
    first = rows[0]
    found = first.record.get("returns")
    if not isinstance(found, list) or len(found) != 3:
        raise first.refuse("returns", "three numbers")
    return ImitationRows(
        first.text("run"), first.text("env"), first.whole("parameters"), first.table("config"),
        (float(found[0]), float(found[-1])),
        [row for key, row in kept.items() if key[0] == ImitateEvent.kind],
        [asked(row) for key, row in kept.items() if key[0] == AskedEvent.kind],
    )  # fmt: skip


def asked(row: Line) -> AskedEvent:
    number = lambda key: row.number(key) if row.record.get(key) is not None else math.nan  # noqa: E731
    return AskedEvent(
        row.whole("step"), row.text("env"), number("target"), row.whole("episodes"), row.number("episode_return"),
        row.number("deviation"), row.number("length"), number("success"),
    )  # fmt: skip


class Got(NamedTuple):
    """What an arm got for one return that was asked for."""

    target: float
    """NaN: nothing was asked for"""
    each: list[float]
    """the mean return of each run's episodes"""
    success: list[float]
    """the share of right episodes of each run; NaN: unknown"""
    deviation: float
    """standard deviation over episodes, the mean of all runs"""

    @property
    def mean(self) -> float:
        return sum(self.each) / len(self.each)


@dataclass(frozen=True)
class ImitationArm:
    """Runs that differ in nothing but their seed."""

    name: str
    runs: list[ImitationRows]

    def got(self) -> list[Got]:
        """For every return that all runs asked for, the smallest first."""
        found = []
        asked = [{repr(e.target): e for e in run.asked} for run in self.runs]
        for key in asked[0]:
            if all(key in one for one in asked):
                events = [one[key] for one in asked]
                returns, right = ([getattr(e, name) for e in events] for name in ("episode_return", "success"))
                spread = sum(e.deviation for e in events) / len(events)
                found.append(Got(events[0].target, returns, right, spread))
        return sorted(found, key=lambda one: one.target)

    def rank_correlation(self) -> float:
        """Of returns asked for and mean returns got; NaN for fewer than three."""
        found = [one for one in self.got() if not math.isnan(one.target)]
        if len(found) < 3:
            return math.nan
        return spearman([one.target for one in found], [one.mean for one in found])


def imitation_arms(runs: Sequence[ImitationRows]) -> list[ImitationArm]:
    """Runs with equal settings together, each arm named by its method and by what else differs from other arms."""
    return [
        ImitationArm(", ".join([method_name(runs[group.runs[0]].config), *group.text()]), [runs[n] for n in group.runs])
        for group in group_runs([run.config for run in runs], RUN_ONLY, NAMED)
    ]


def method_name(config: dict) -> str:
    learn = config.get("imitate", {})
    name = "cloning" if learn.get("method") == "cloning" else "Decision Transformer"
    share = learn.get("top", 1.0)
    return name if share == 1 else f"{name} of the best {100 * share:g} %"
