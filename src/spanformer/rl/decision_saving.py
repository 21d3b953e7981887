"""Checkpoints of a Decision Transformer: all that a run needs to repeat every bit from there, and a model to play."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.core.fields import as_dict, build
from spanformer.memory import State
from spanformer.model.folder import META, faults, open_part, read_meta
from spanformer.model.weights import misfit, shapes
from spanformer.rl.decision import DecisionTransformer, Task
from spanformer.rl.decision_config import ImitationConfig
from spanformer.rl.envs.batch import BatchEnv
from spanformer.rl.memory import Segments
from spanformer.rl.trajectories import About
from spanformer.train.checkpoint import Checkpoints, pack_optimizer, unpack_optimizer

if TYPE_CHECKING:
    from spanformer.rl.decision_run import ImitationRun

KEY = "imitation"
"""the key of meta.json that only these checkpoints have"""


def save(run: ImitationRun) -> Path:
    moments, hyper = pack_optimizer(run.optimizer, run.named.items())
    parts = {"model": run.model.state_dict(), "optimizer": moments}
    if run.state is not None:
        parts["memory"] = {name: t.contiguous() for name, t in Segments(run.state).tensors().items()}
        parts["streams"] = run.streams.tensors()
    meta = {
        KEY: as_dict(run.config), "task": asdict(run.model.task), "about": asdict(run.data.about),
        "returns": run.returns, "optimizer": hyper, "seconds": run.seconds,
    }  # fmt: skip
    return run.checkpoints.save(run.steps, parts, meta)


def restore(run: ImitationRun, path: Path) -> None:
    """Continue from a checkpoint."""
    meta, parts = run.checkpoints.load(path)
    try:
        check_task(run.model.task, run.data.about, meta, path)
        load_weights(run.model, dict(parts["model"]), path)
        unpack_optimizer(run.optimizer, run.named.items(), dict(parts["optimizer"]), meta["optimizer"])
        run.steps, run.seconds = meta["step"], meta["seconds"]
        if run.config.imitate.context == "episode":
            run.state = restored(run.model.stack.start(run.config.imitate.batch), copies(dict(parts["memory"])))
            run.streams.load(dict(parts["streams"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a checkpoint of such a run of `rl imitate` ({error!r}); choose another --out"
        ) from error


def restored(empty: State, tensors: dict[str, Tensor]) -> State:
    return Segments(empty).with_tensors(tensors).state


def check_task(task: Task, about: About, meta: dict, path: Path) -> None:
    """Refuse a checkpoint that was trained with other observations or actions."""
    then, env = Task(**meta["task"]), meta["about"]["env"]
    if (then.observation, then.actions, then.continuous) != (task.observation, task.actions, task.continuous):
        raise ValueError(
            f"{path} was trained in {env} with {sizes(then)}; {about.env} has {sizes(task)}: expected an environment "
            "with the same ones"
        )


def sizes(task: Task) -> str:
    kind = "numbers of an action" if task.continuous else "actions"
    return f"{task.observation} numbers of observation and {task.actions} {kind}"


def load_weights(model: DecisionTransformer, weights: dict[str, Tensor], path: Path) -> None:
    if wrong := misfit(shapes(weights), shapes(model.state_dict())):
        raise ValueError(f"{path} does not fit this model: {wrong}; expected the same [model], data and imitate.method")
    model.load_state_dict(weights)


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: safetensors returns views with another alignment, and sums may then round differently."""
    return {name: t.clone() for name, t in tensors.items()}


class Loaded:
    """The newest model of a run, or of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        found = newest(path)
        meta = read_meta(found)
        self.path, self.config = found, build(ImitationConfig, meta[KEY], where=str(found / META))
        self.about, self.returns = About(**meta["about"]), [float(r) for r in meta["returns"]]
        self.model = make_model(self.config, Task(**meta["task"]))
        load_weights(self.model, dict(open_part(found, "model")), found)
        self.model.eval()

    def check(self, env: BatchEnv) -> None:
        """Refuse another environment's sizes."""
        t = self.model.task
        here = Task(env.observation, env.actions, t.continuous, t.longest)
        about = About(env.name, 0, env.actions, t.continuous, "", 0)
        check_task(here, about, {"task": asdict(t), "about": asdict(self.about)}, self.path)


def newest(path: str | Path) -> Path:
    """The newest complete checkpoint of a run, or the one given."""
    path = Path(path)
    found = path if (path / META).exists() else Checkpoints(path / "checkpoints").newest(lambda _: None)
    if found is None or faults(found):
        raise ValueError(f"{path} holds no complete checkpoint; expected the folder of a run of `spanformer rl`")
    return found


def is_imitation(path: str | Path) -> bool:
    """Whether a run or checkpoint is one of `rl imitate`."""
    return KEY in read_meta(newest(path))


def make_model(config: ImitationConfig, task: Task) -> DecisionTransformer:
    torch.manual_seed(config.imitate.seed)
    return DecisionTransformer(config.model, task, returns=config.imitate.method == "decision")
