"""Recorded episodes as a Minari data set, for other programs. minari is imported when it is used.

MINARI_DATASETS_PATH says where Minari keeps its data sets.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from spanformer.rl.envs.gym import IDS, load_gymnasium, register
from spanformer.rl.trajectories import Trajectories


def load_minari() -> Any:
    try:
        return importlib.import_module("minari")
    except ImportError as error:
        raise ImportError(
            "minari is not installed; install it with: pip install 'minari>=0.5' h5py, or leave --minari out"
        ) from error


def export_minari(data: Trajectories, id: str) -> Any:
    """Create data set `id`, such as key_to_door/random-v0. Observations of an episode have one more row, the last."""
    minari, gymnasium = load_minari(), load_gymnasium()
    from minari.data_collector.episode_buffer import EpisodeBuffer  # pyright: ignore[reportMissingImports]

    about = data.about
    buffers = []
    for e, (start, n) in enumerate(zip(data.starts, data.lengths, strict=True)):
        steps, last = slice(start, start + n), np.arange(n) == n - 1
        seen = np.concatenate([data.observation[steps], data.final[e : e + 1]])
        over = bool(data.terminated[e])
        buffers.append(
            EpisodeBuffer(
                id=e, observations=seen, actions=data.action[steps], rewards=data.reward[steps],
                terminations=last & over, truncations=last & (not over),
            )
        )  # fmt: skip
    spaces = gymnasium.spaces
    register()
    names = {name: id for id, name in IDS.items()}
    env = gymnasium.make(names[about.env], length=about.length).spec if about.env in names else about.env
    try:
        return minari.create_dataset_from_buffers(
            id, buffers, env=env, algorithm_name=about.policy, observation_space=_box(data),
            action_space=spaces.Discrete(about.actions),
        )  # fmt: skip
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--minari is {id!r}, which minari refuses: {error}") from None


def _box(data: Trajectories) -> Any:
    return load_gymnasium().spaces.Box(-np.inf, np.inf, (data.observation.shape[1],), np.float32)
