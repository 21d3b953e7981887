"""gymnasium's environments as a batch, and the batches of this project as gymnasium's environments.

gymnasium is an extra: it is imported when an environment of it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spanformer.rl.envs.batch import BatchEnv, Step
from spanformer.rl.envs.graph import Graph
from spanformer.rl.envs.key_to_door import KeyToDoor
from spanformer.rl.envs.memory_chain import MemoryChain
from spanformer.rl.envs.t_maze import TMaze

OURS = {"t_maze": TMaze, "memory_chain": MemoryChain, "key_to_door": KeyToDoor, "graph": Graph}
PACKAGES = {"popgym-": "popgym"}
"""packages that make environments known to gymnasium, by how the ids begin; imported when such an id is asked for"""
IDS = {
    "spanformer/TMaze-v0": "t_maze",
    "spanformer/MemoryChain-v0": "memory_chain",
    "spanformer/KeyToDoor-v0": "key_to_door",
    "spanformer/Graph-v0": "graph",
}


def make_batch(name: str, rows: int, length: int, *, continuous: bool = False) -> BatchEnv:
    """name: one of `OURS`, or an id that gymnasium knows. length: of ours only. continuous: see `GymBatch`."""
    if continuous and name in OURS:
        raise ValueError(f"{name} has discrete actions; expected an environment of gymnasium with continuous ones")
    return OURS[name](rows, length) if name in OURS else GymBatch(name, rows, continuous=continuous)


def load_gymnasium() -> Any:
    try:
        return importlib.import_module("gymnasium")
    except ImportError as error:
        raise ImportError(
            f"gymnasium is not installed; install it with: pip install 'spanformer[rl]', or use one of "
            f"{', '.join(OURS)}, which do not need it"
        ) from error


def load_package(name: str) -> None:
    """Import the package of an environment, if its id says which."""
    for begin, package in PACKAGES.items():
        if name.startswith(begin):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ValueError(
                    f"env.id is {name!r}, whose package {package} is not installed; install it with: pip install "
                    f"{package}"
                ) from error


def register() -> None:
    """Make the environments of this project known to gymnasium, by the ids of `IDS`."""
    gymnasium = load_gymnasium()
    for id, name in IDS.items():
        if id not in gymnasium.registry:
            gymnasium.register(id, entry_point=f"{__name__}:_single", kwargs={"name": name})


def _single(name: str, length: int = 50) -> Any:
    """One environment of gymnasium around a batch of one row."""
    gymnasium = load_gymnasium()
    batch: BatchEnv = OURS[name](1, length)

    class Single(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (batch.observation,), np.float32)
        action_space = gymnasium.spaces.Discrete(batch.actions)

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
            if seed is not None:
                batch.seed(seed)
            return batch.reset()[0], {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
            s = batch.step(np.array([action]))
            ended = bool(s.terminated[0] or s.truncated[0])
            info = {"is_success": bool(s.success[0])} if ended else {}
            return s.final[0], float(s.reward[0]), bool(s.terminated[0]), bool(s.truncated[0]), info

    return Single()


class GymBatch:
    """Environments of gymnasium, one after the other: a vector of numbers or a discrete observation, and discrete
    actions, or (with `continuous`) vectors of numbers, given as −1 … 1 of their bounds."""

    def __init__(self, name: str, rows: int, *, continuous: bool = False) -> None:
        gymnasium = load_gymnasium()
        register()
        load_package(name)
        try:
            self.envs = [gymnasium.make(name, disable_env_checker=True) for _ in range(rows)]
        except gymnasium.error.DependencyNotInstalled as error:
            raise ValueError(f"env.id is {name!r}, which needs a package: {error}") from None
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(
                f"env.id is {name!r}, which gymnasium cannot make ({error}); expected {', '.join(OURS)} or an id of an "
                "installed environment"
            ) from None
        spaces, seen, acts = gymnasium.spaces, self.envs[0].observation_space, self.envs[0].action_space
        self.discrete = isinstance(seen, spaces.Discrete)
        if not self.discrete and not (isinstance(seen, spaces.Box) and len(seen.shape) == 1):
            raise ValueError(
                f"env.id is {name!r}, whose observations are {seen}; expected a vector (Box of one axis) or Discrete: "
                "flatten dicts, and encode images, by a wrapper of gymnasium"
            )
        vector = isinstance(acts, spaces.Box) and len(acts.shape) == 1 and bool(acts.is_bounded())
        if not (vector if continuous else isinstance(acts, spaces.Discrete)):
            wanted = "a bounded vector (Box of one axis)" if continuous else "Discrete actions"
            raise ValueError(f"env.id is {name!r}, whose actions are {acts}; expected {wanted}")
        self.name, self.rows, self.bounds = name, rows, (acts.low, acts.high) if continuous else None
        self.actions = int(acts.shape[0] if continuous else acts.n)
        self.observation = int(seen.n) if self.discrete else int(seen.shape[0])
        self.first_action = 0 if continuous else int(acts.start)
        self.first_seen = int(seen.start) if self.discrete else 0
        self.one_hot = np.eye(self.observation if self.discrete else 0, dtype=np.float32)
        self.seeds: list[int | None] = [None] * rows

    def seed(self, seed: int) -> None:
        self.seeds = [seed * 4096 + n for n in range(self.rows)]

    def reset(self) -> np.ndarray:
        return np.stack([self._reset(n) for n in range(self.rows)]).astype(np.float32)

    def _reset(self, n: int) -> np.ndarray:
        seed, self.seeds[n] = self.seeds[n], None  # at the first reset after seed(); later ones draw on
        return self._read(self.envs[n].reset(seed=seed)[0])

    def _read(self, seen: Any) -> np.ndarray:
        if self.discrete:
            return self.one_hot[int(seen) - self.first_seen]
        return seen

    def step(self, action: np.ndarray) -> Step:
        n = self.rows
        final, reward = np.empty((n, self.observation), np.float32), np.empty(n, np.float32)
        over, cut, success = np.empty(n, bool), np.empty(n, bool), np.full(n, np.nan, np.float32)
        for row, (env, chosen) in enumerate(zip(self.envs, self._actions(action), strict=True)):
            seen, reward[row], over[row], cut[row], info = env.step(chosen)
            final[row] = self._read(seen)
            if (over[row] or cut[row]) and "is_success" in info:
                success[row] = info["is_success"]
        cut &= ~over
        now = final.copy()
        for row in np.flatnonzero(over | cut).tolist():
            now[row] = self._reset(row)
        return Step(now, reward, over, cut, final, success)

    def _actions(self, action: np.ndarray) -> Sequence[Any]:
        if self.bounds is None:
            return (action + self.first_action).tolist()
        low, high = self.bounds
        return list((low + (np.clip(action, -1, 1) + 1) / 2 * (high - low)).astype(low.dtype))

    def arrays(self) -> None:
        return None

    def load(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        return self.reset()
