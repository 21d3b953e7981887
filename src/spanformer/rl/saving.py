"""Checkpoints of a policy: all that a run needs to repeat every bit from there, and a policy alone for playing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.core.fields import as_dict, build
from spanformer.model.folder import META, faults, open_part, read_meta
from spanformer.model.weights import misfit, shapes
from spanformer.rl.config import EnvConfig, RLConfig
from spanformer.rl.envs.batch import BatchEnv
from spanformer.rl.policy import Policy
from spanformer.train.checkpoint import Checkpoints, pack_optimizer, unpack_optimizer

if TYPE_CHECKING:
    from spanformer.rl.run import PolicyRun

LOST = "the episodes under way cannot be saved in this environment: the resumed run begins new ones"


def save(run: PolicyRun) -> Path:
    moments, hyper = pack_optimizer(run.optimizer, run.named.items())
    episodes = run.env.arrays()
    parts = {
        "model": run.policy.state_dict(),
        "optimizer": moments,
        "memory": {name: t.contiguous() for name, t in run.actor.memory.tensors().items()},
        "actor": run.actor.tensors(),
        "episodes": {name: torch.from_numpy(a) for name, a in (episodes or {}).items()},
    }
    meta = {
        "policy": as_dict(run.config), "env": run.env.name, "observation": run.env.observation,
        "actions": run.env.actions, "optimizer": hyper, "seconds": run.seconds, "saved_episodes": episodes is not None,
    }  # fmt: skip
    return run.checkpoints.save(run.updates, parts, meta)


def restore(run: PolicyRun, path: Path) -> str:
    """Continue from a checkpoint; returns what could not be restored, or ''."""
    meta, parts = run.checkpoints.load(path)
    try:
        check_env(run.env, meta, path)
        if meta["env"] != run.env.name:
            raise ValueError(
                f"{path} was trained in {meta['env']}, and env.id is {run.env.name!r}; expected the same environment "
                "to resume, or another --out"
            )
        load_weights(run.policy, dict(parts["model"]), path)
        rates = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
        unpack_optimizer(run.optimizer, run.named.items(), dict(parts["optimizer"]), meta["optimizer"])
        for group, now in zip(run.optimizer.param_groups, rates, strict=True):
            group.update(now)
        run.updates, run.seconds = int(meta["step"]), float(meta["seconds"])
        actor = _copies(dict(parts["actor"]))
        if len(actor["episode"]) != run.env.rows:
            raise ValueError(
                f"env.count is {run.env.rows}; {path} has {len(actor['episode'])} environments: expected the same"
            )
        run.actor.memory = run.actor.memory.with_tensors(_copies(dict(parts["memory"])))
        if meta["saved_episodes"]:
            run.actor.load(actor, run.env.load({name: t.numpy() for name, t in dict(parts["episodes"]).items()}))
            return ""
        run.actor.episode = actor["episode"]
        run.actor.begin_again()
        return LOST
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a policy's checkpoint ({error!r}); choose another --out") from error


def check_env(env: BatchEnv, meta: dict, path: Path) -> None:
    """Refuse a checkpoint that was trained with other observations or actions."""
    if (env.observation, env.actions) != (meta["observation"], meta["actions"]):
        raise ValueError(
            f"{path} was trained in {meta['env']} with {meta['observation']} numbers of observation and "
            f"{meta['actions']} actions; {env.name} has {env.observation} and {env.actions}: expected an environment "
            "with the same ones"
        )


def load_weights(policy: Policy, weights: dict[str, Tensor], path: Path) -> None:
    if wrong := misfit(shapes(weights), shapes(policy.state_dict())):
        raise ValueError(f"{path} does not fit this policy: {wrong}; expected the same [model] and ppo.policy")
    policy.load_state_dict(weights)


def make_policy(config: RLConfig, env: BatchEnv) -> Policy:
    return Policy(config.ppo.policy, config.model, env.observation, env.actions)


def load_policy(path: str | Path, env_of: EnvConfig | None, rows: int) -> tuple[Policy, BatchEnv]:
    """The newest policy of a run, or of a checkpoint, and its environments; env_of: others than it was trained in."""
    from spanformer.rl.envs.gym import make_batch

    path = Path(path)
    found = path if (path / META).exists() else Checkpoints(path / "checkpoints").newest(lambda _: None)
    if found is None or faults(found):
        raise ValueError(f"{path} holds no complete checkpoint; expected the folder of a run of `spanformer rl train`")
    meta = read_meta(found)
    if "policy" not in meta:
        raise ValueError(f"{found} is no checkpoint of a policy; expected the folder of a run of `spanformer rl train`")
    config = build(RLConfig, meta["policy"], where=str(found / META))
    chosen = env_of or config.env
    env = make_batch(chosen.id, rows, chosen.length)
    check_env(env, meta, found)
    policy = make_policy(config, env)
    load_weights(policy, dict(open_part(found, "model")), found)
    return policy.eval(), env


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies: safetensors returns views with another alignment, and sums may then round differently."""
    return {name: t.clone() for name, t in tensors.items()}
