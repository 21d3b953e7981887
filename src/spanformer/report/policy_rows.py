"""The recorded rows of policies: one run, and the runs of one arm with different seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spanformer.core.events import FILE, ResumeEvent
from spanformer.core.policy_events import PlayEvent, PolicyStartEvent, UpdateEvent
from spanformer.report.arms import group_runs
from spanformer.report.rows import Line

SMOOTHED = 5
"""updates of the running mean"""
RUN_ONLY = {"out", "resume", "ppo.seed", "ppo.threads", "ppo.tensorboard", "ppo.save_every", "ppo.keep",
            "ppo.eval_episodes"}  # fmt: skip
"""settings that do not make another arm"""


@dataclass(frozen=True)
class PolicyRows:
    """The rows of one run."""

    name: str
    env: str
    parameters: int
    config: dict
    updates: list[Line]
    played: Line | None
    """the last evaluation"""

    @property
    def task(self) -> str:
        """The environment, with its length if it has one."""
        return f"{self.env} of {self.length} steps" if self.length else self.env

    @property
    def length(self) -> int:
        """Steps between cue and answer; 0: an environment without this setting."""
        return int(self.config.get("env", {}).get("length", 0)) if self.env in ("t_maze", "memory_chain") else 0

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Environment steps, and the running mean of a number; updates without it are left out."""
        found = [(u.whole("env_steps"), u.number(key)) for u in self.updates if u.record.get(key) is not None]
        steps, values = np.array([s for s, _ in found]), np.array([v for _, v in found])
        sums = np.cumsum(np.concatenate([[0.0], values]))
        at = np.arange(1, len(values) + 1)
        first = np.maximum(at - SMOOTHED, 0)
        return steps, (sums[at] - sums[first]) / (at - first) if len(values) else values


def read_policy(path: Path) -> PolicyRows:
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"{path} has no {FILE}; expected the folder of a run of `spanformer rl train`")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    rows = [Line(json.loads(line), f"{file}, line {n}") for n, line in enumerate(lines, 1)]
    if not rows or rows[0].record.get("event") != PolicyStartEvent.kind:
        raise ValueError(f"{file} does not begin a run of a policy; expected the folder of a run of `rl train`")
    kept: dict[tuple[str, int], Line] = {}
    for row in rows[1:]:
        kind, step = row.text("event"), row.whole("step")
        if kind == ResumeEvent.kind:  # later rows are void: these updates are repeated
            kept = {key: old for key, old in kept.items() if key[1] <= step}
        kept.pop((kind, step), None)
        kept[kind, step] = row
    first = rows[0]
    played = [row for (kind, _), row in kept.items() if kind == PlayEvent.kind]
    return PolicyRows(
        first.text("run"), first.text("env"), first.whole("parameters"), first.table("config"),
        [row for (kind, _), row in kept.items() if kind == UpdateEvent.kind], played[-1] if played else None,
    )  # fmt: skip


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but their seed."""

    name: str
    runs: list[PolicyRows]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Environment steps that all runs reached; mean, lowest and highest value."""
        found = [curve for run in self.runs if len((curve := run.curve(key))[0])]
        if not found:
            nothing = np.array([])
            return nothing, nothing, nothing, nothing
        first, last = max(steps[0] for steps, _ in found), min(steps[-1] for steps, _ in found)
        steps = np.unique(np.concatenate([steps for steps, _ in found]))
        steps = steps[(steps >= first) & (steps <= last)]
        values = np.stack([np.interp(steps, *curve) for curve in found])
        return steps, values.mean(0), values.min(0), values.max(0)

    def spans(self) -> list[list[list[float | None]]]:
        """[runs][layers][heads] after training, of runs that learn spans."""
        return [spans for run in self.runs if run.updates and (spans := run.updates[-1].record.get("spans"))]


def arms_of(runs: Sequence[PolicyRows]) -> list[Arm]:
    """Runs with equal settings together, each arm named by its policy and by what else differs from other arms."""
    arms = []
    for group in group_runs([run.config for run in runs], RUN_ONLY, NAMED):
        some = [runs[n] for n in group.runs]
        blocks = group.settings.get("ppo.policy") == "transformer"
        arms.append(Arm(", ".join([policy_name(some[0].config), *group.text(model=blocks)]), some))
    return arms


NAMED = {"ppo.policy", "model.block", "model.order", "model.gate"}
"""settings that the name of a policy says"""


def policy_name(config: dict) -> str:
    kind, model = config.get("ppo", {}).get("policy"), config.get("model", {})
    if kind in ("lstm", "mlp"):
        return kind.upper()
    if model.get("block") == "gated":
        gate = model.get("gate")
        return "Gated Transformer-XL" + ("" if gate in (None, "gru") else f", {gate} gate")
    return f"Transformer-XL, {model.get('order', 'pre')}-norm"
