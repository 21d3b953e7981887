"""Recorded episodes: what imitation learns from, as one .npz file.

    FILE.npz    observation [S, O], action [S] or [S, A], reward [S]: the steps of all episodes, one after the other;
                lengths [E], terminated [E], success [E], final [E, O]: of each episode; about: JSON, the fields below

Written whole or not at all, and read as untrusted data: nothing in it is unpickled, and what does not fit is refused.

Shapes: E episodes, S steps of all of them, O numbers of an observation, A numbers of a continuous action.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from spanformer.core.files import replace_file

FORMAT = 1
ARRAYS = {
    "observation": (2, np.float32), "reward": (1, np.float32), "lengths": (1, np.int64), "terminated": (1, np.bool_),
    "success": (1, np.float32), "final": (2, np.float32),
}  # fmt: skip
"""axes and dtype of each array but action"""


@dataclass(frozen=True)
class About:
    env: str
    """its id"""
    length: int
    """`env.length`, for environments of this project"""
    actions: int
    """number of discrete actions, or of numbers of a continuous one"""
    continuous: bool
    policy: str
    """what acted, in words"""
    seed: int
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class Trajectories:
    about: About
    observation: np.ndarray
    action: np.ndarray
    """[S] int64, or [S, A] float32 in −1 … 1 of the environment's bounds"""
    reward: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    """[E] the episode ended by itself; otherwise it was cut"""
    success: np.ndarray
    """[E] 1 or 0; NaN: the environment does not say"""
    final: np.ndarray
    """[E, O] the observation after the last step"""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return len(self.reward)

    @cached_property
    def starts(self) -> np.ndarray:
        """[E] the first step of each episode."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def time(self) -> np.ndarray:
        """[S] the steps of its episode before each step."""
        return np.arange(self.steps) - np.repeat(self.starts, self.lengths)

    @cached_property
    def returns_to_go(self) -> np.ndarray:
        """[S] float64: the sum of rewards from each step to the end of its episode."""
        sums = np.concatenate([[0.0], np.cumsum(self.reward, dtype=np.float64)])
        return np.repeat(sums[self.starts + self.lengths], self.lengths) - sums[:-1]

    @cached_property
    def returns(self) -> np.ndarray:
        """[E] float64"""
        return self.returns_to_go[self.starts]

    def best(self, share: float) -> Trajectories:
        """The episodes of the highest returns that hold this share of the steps, at least one."""
        order = np.argsort(-self.returns, kind="stable")
        count = 1 + np.searchsorted(np.cumsum(self.lengths[order])[:-1], share * self.steps, side="left")
        return self.pick(np.sort(order[:count]))

    def pick(self, episodes: np.ndarray) -> Trajectories:
        """Some episodes, by their indices."""
        lengths = self.lengths[episodes]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        steps = np.repeat(self.starts[episodes], lengths) + within
        per_step = (each[steps] for each in (self.observation, self.action, self.reward))
        per_episode = (each[episodes] for each in (self.lengths, self.terminated, self.success, self.final))
        return Trajectories(self.about, *per_step, *per_episode)

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        arrays = {name: getattr(self, name) for name in (*ARRAYS, "action")}
        with replace_file(path) as new, open(new, "wb") as stream:
            np.savez_compressed(stream, about=np.array(json.dumps(asdict(self.about))), **arrays)

    def said(self) -> str:
        """One sentence about the data."""
        right = self.success[~np.isnan(self.success)]
        share = f", {100 * right.mean():.1f} % right" if len(right) else ""
        return (
            f"{len(self):,} episodes of {self.about.env} by {self.about.policy}, {self.steps:,} steps: return "
            f"{self.returns.mean():.3f} on average, {self.returns.min():.3f} … {self.returns.max():.3f}{share}"
        )


def read_trajectories(path: str | Path) -> Trajectories:
    """The episodes of a file; raises a ValueError that says what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; expected recorded episodes: `spanformer rl collect` writes them")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
            about = About(**json.loads(str(found.pop("about"))))
    except KeyError:
        raise ValueError(f"{path} has no `about`; expected a file of `spanformer rl collect`") from None
    except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} cannot be read ({error}); expected a file of `spanformer rl collect`") from None
    if about.format != FORMAT:
        raise ValueError(f"{path} has format {about.format}; this version reads format {FORMAT}: collect it again")
    missing = [name for name in (*ARRAYS, "action") if name not in found]
    if missing:
        raise ValueError(f"{path} has no {missing[0]}; expected recorded episodes with all of {', '.join(found)}, it")
    return checked(Trajectories(about, **{name: found[name] for name in (*ARRAYS, "action")}), str(path))


def checked(t: Trajectories, where: str) -> Trajectories:
    """The same episodes; raises a ValueError if they do not fit together."""
    shapes = {name: ARRAYS[name] for name in ARRAYS} | {
        "action": (2, np.float32) if t.about.continuous else (1, np.int64)
    }
    for name, (axes, dtype) in shapes.items():
        array = getattr(t, name)
        if array.ndim != axes or array.dtype != dtype:
            raise ValueError(
                f"{where}: {name} is {array.dtype} of {array.ndim} axes; expected {np.dtype(dtype)} of {axes}"
            )
        count = t.steps if name in ("observation", "action", "reward") else len(t)
        if len(array) != count:
            raise ValueError(f"{where}: {name} has {len(array):,} rows; expected {count:,}, as the others have")
        if array.dtype == np.float32 and name != "success" and not np.isfinite(array).all():
            raise ValueError(f"{where}: {name} holds numbers that are not finite; remove these episodes")
    if not len(t) or (t.lengths < 1).any() or t.lengths.sum() != t.steps:
        raise ValueError(
            f"{where}: lengths are {len(t):,} numbers with the sum {t.lengths.sum():,}; expected positive numbers with "
            f"the sum of the steps, {t.steps:,}"
        )
    if t.final.shape[1] != t.observation.shape[1]:
        raise ValueError(
            f"{where}: final has {t.final.shape[1]} numbers; expected {t.observation.shape[1]}, as observation has"
        )
    if t.about.continuous and t.action.shape[1] != t.about.actions:
        raise ValueError(f"{where}: action has {t.action.shape[1]} numbers; expected {t.about.actions}")
    if not t.about.continuous and not (t.action.min() >= 0 and t.action.max() < t.about.actions):
        raise ValueError(
            f"{where}: action holds {t.action.min()} … {t.action.max()}; expected 0 … {t.about.actions - 1}"
        )
    return t
