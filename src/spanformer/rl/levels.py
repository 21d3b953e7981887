"""Which checkpoints of a PPO run act, so that recorded episodes are of one level, after D4RL (Fu et al., 2020),
https://arxiv.org/abs/2004.07219

expert          the last checkpoint
medium          the first one whose return in training is half-way between the first update's and the last one's
medium-replay   all checkpoints up to the medium one, as many episodes of each: what the run played until then
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

from spanformer.core.events import FILE
from spanformer.core.policy_events import UpdateEvent
from spanformer.model.folder import read_meta
from spanformer.rl.config import EnvConfig
from spanformer.rl.recording import Trajectories, join, policy_player, record, seed_player
from spanformer.rl.saving import load_policy
from spanformer.rl.trajectories import About

Level = Literal["expert", "medium", "medium-replay"]
SMOOTHED = 10
"""updates of the running mean of returns"""


def checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the earliest first."""
    found = sorted((run / "checkpoints").glob("step-*"))
    if not found:
        raise ValueError(f"{run} has no checkpoints; expected the folder of a run of `spanformer rl train`")
    return found


def returns_by_update(run: Path) -> dict[int, float]:
    """The running mean of training returns after each update."""
    try:
        rows = [json.loads(line) for line in (run / FILE).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{run / FILE} cannot be read ({error}); expected a run of `spanformer rl train`") from None
    raw = {row["step"]: row.get("episode_return") for row in rows if row.get("event") == UpdateEvent.kind}
    found, last = {}, []
    for step, value in sorted(raw.items()):
        last = last if value is None or math.isnan(value) else [*last, value][-SMOOTHED:]
        if last:
            found[step] = sum(last) / len(last)
    return found


def acting(run: Path, level: Level) -> list[Path]:
    """The checkpoints that act."""
    found = checkpoints(run)
    if level == "expert":
        return found[-1:]
    returns = returns_by_update(run)
    if not returns:
        raise ValueError(f"{run} has no returns of episodes in {FILE}; expected a longer run, or level expert")
    first, last = returns[min(returns)], returns[max(returns)]
    half = [path for path in found if returns.get(read_meta(path)["step"], -math.inf) >= (first + last) / 2]
    middle = half[0] if half else found[-1]
    if middle == found[0]:
        raise ValueError(
            f"{run} keeps no checkpoint from before half of its final return, {(first + last) / 2:.3g}; train it with "
            "--ppo.save-every 10 --ppo.keep 1000"
        )
    return [middle] if level == "medium" else found[: found.index(middle) + 1]


def collect_policy(
    run: Path, level: Level, count: int, rows: int, *, env: EnvConfig | None, seed: int, greedy: bool
) -> Trajectories:  # fmt: skip
    """`count` episodes of the checkpoints of a level; actions are drawn by their probabilities, unless greedy."""
    paths, parts = acting(run, level), []
    for n, path in enumerate(paths):
        some = count // len(paths) + (n < count % len(paths))
        if not some:
            continue
        policy, batch = load_policy(path, env, min(rows, some))
        length = env.length if env is not None else read_meta(path)["policy"]["env"]["length"]
        about = About(batch.name, length, batch.actions, False, f"{level} of {run.name}", seed)
        seed_player(batch, seed + n)
        parts.append(record(policy_player(batch, policy, greedy=greedy), batch.rows, some, about))
    return join(parts, parts[0].about)
