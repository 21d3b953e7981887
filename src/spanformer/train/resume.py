"""All that a run must remember to go on exactly where it was, and putting it back.

Layer memories are kept for all lanes together, and sharded tensors whole, so a run saved by some number of processes
continues under any other. Dropout needs nothing: it is drawn from seed and step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spanformer.model.lm import State
from spanformer.model.fields import as_dict, build
from spanformer.train.checkpoint import pack_optimizer, unpack_optimizer

if TYPE_CHECKING:
    from spanformer.train.run import Run

Parts = dict[str, dict[str, Tensor]]


def snapshot(run: Run) -> tuple[Parts, dict]:
    """The tensors and plain values of a checkpoint; every process takes part, the first gets them."""
    moments, hyper = pack_optimizer(run.optimizer, run.named.items())
    parts = {
        "model": {name: whole(t) for name, t in run.model.state_dict().items()},
        "optimizer": {name: whole(t) for name, t in moments.items()},
        "memory": _gather_memory(run),
    }
    meta = {
        "config": as_dict(run.config),
        "model": as_dict(run.config.model),
        "vocab": run.data.vocab.to_json(),
        "unit": run.data.unit,
        "progress": run.progress.state(),
        "guard": run.guard.state(),
        "diagnosis": run.diagnosis.state(),
        "lanes": run.lanes.state(),
        "seen": run.state.seen if run.state else 0,
        "optimizer": hyper,
        "seed": run.config.train.seed,
    }
    return parts, meta


def restore(run: Run, path: Path) -> None:
    """Continue from the checkpoint; a ValueError names what of it does not fit the run's configuration."""
    meta, parts = run.checkpoints.load(path)
    _check_fits(run, meta, path)
    load_model(run, parts["model"], path)
    moments = {name: t.to(run.world.device) for name, t in parts["optimizer"].items()}
    settings = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    unpack_optimizer(run.optimizer, run.named.items(), moments, meta["optimizer"])
    for group, now in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(now)  # a run may go on with another learning rate
    run.progress.load(meta["progress"])
    run.guard.load(meta["guard"])
    run.diagnosis.load(meta["diagnosis"])
    run.lanes.load(meta["lanes"])
    rows = run.world.rows(run.config.train.batch)
    memory = parts["memory"]
    if memory:
        # copies: what safetensors reads is mapped from files that the run will remove
        hidden = tuple(memory[f"hidden.{n}"][rows].to(run.world.device, copy=True) for n in range(len(memory)))
        run.state = State(hidden, meta["seen"])


def load_model(run: Run, tensors: dict[str, Tensor], path: Path) -> None:
    own = run.model.state_dict()
    wrong = [name for name in own if name not in tensors or tensors[name].shape != own[name].shape]
    wrong += [name for name in tensors if name not in own]
    if wrong:
        raise ValueError(f"{path} does not fit this model: {', '.join(wrong[:3])} {'…' if wrong[3:] else ''}")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(shard_like(tensors[name].to(run.world.device), t))


def whole(t: Tensor) -> Tensor:
    """A sharded tensor put together (every process must take part); any other as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(t: Tensor, like: Tensor) -> Tensor:
    """t sharded as `like` is, if it is."""
    if not hasattr(like, "full_tensor"):
        return t
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, like.device_mesh, like.placements)  # pyright: ignore[reportAttributeAccessIssue]


def _gather_memory(run: Run) -> dict[str, Tensor]:
    if run.state is None:
        return {}
    gathered = [run.world.gather_rows(h) for h in run.state.hidden]
    return {f"hidden.{n}": h for n, h in enumerate(gathered) if h is not None}


def _check_fits(run: Run, meta: dict, path: Path) -> None:
    """Model, data and lanes must be those of the checkpoint; how to train on may change."""
    # built, so that a key of a newer version is refused and one an older version did not have yet has its default
    now, then = as_dict(run.config), as_dict(build(type(run.config), meta["config"], str(path)))
    for section in ("model", "data"):
        _same(f"{section}.", now[section], then[section], path, ignore=("cache", "from", "backend", "penalty", "dropout"))
    _same("optim.", {"kind": now["optim"]["kind"]}, then["optim"], path, ignore=())
    lanes = {name: now["train"][name] for name in ("batch", "block", "seed")}
    _same("train.", lanes, then["train"], path, ignore=())
    if meta["vocab"] != run.data.vocab.to_json():
        raise ValueError(
            f"{path} was made with another vocabulary than {run.config.data.source} has now; give it the same text, or "
            "begin another run with another --out"
        )


def _same(where: str, now: dict, then: dict, path: Path, ignore: tuple[str, ...]) -> None:
    for key, value in now.items():
        before = then.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _same(f"{where}{key}.", value, before, path, ignore)
        elif key not in ignore and value != before:
            raise ValueError(
                f"{path} was made with {where}{key} = {before!r}, and this run has {value!r}; change it back, or begin "
                "another run with another --out"
            )
