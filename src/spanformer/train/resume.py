"""All that a run must remember to go on exactly where it was, and putting it back.

Every tensor is saved by its name and its rows: layer memories for the lanes of all processes, sharded weights whole or
as shards that fit together. So a run saved by some number of processes continues under any other. Dropout needs
nothing: it is drawn from seed and step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spanformer.core.checks import whole_number
from spanformer.model.fields import as_dict, build
from spanformer.model.lm import State
from spanformer.model.part import Part
from spanformer.model.weights import misfit, shapes
from spanformer.train.checkpoint import pack_optimizer, unpack_optimizer
from spanformer.train.sharded import Held, own, read_like, whole, write_shards

if TYPE_CHECKING:
    from spanformer.train.run import Run


def save(run: Run) -> Path | None:
    """A checkpoint of the run as it is; every process takes part, the first gets its path."""
    world, checkpoints, progress = run.world, run.checkpoints, run.progress
    moments, hyper = pack_optimizer(run.optimizer, run.named.items())
    memory = {f"hidden.{n}": h for n, h in enumerate(run.state.hidden)} if run.state else {}
    meta = _describe(run) | {"optimizer": hyper}
    score = progress.latest if progress.scored_at == progress.step else None
    if run.config.train.sharded:
        start = world.rows(run.config.train.batch).start
        mine = {
            "model": own(run.model.state_dict(), world),
            "optimizer": own(moments, world),
            "memory": {name: Held(h, start) for name, h in memory.items()},
        }
        if not world.first:
            write_shards(None, mine, world)
            return None
        return checkpoints.save(
            progress.step, {}, meta, score=score, others=lambda folder: write_shards(folder, mine, world)
        )
    gathered = {name: world.gather_rows(h) for name, h in memory.items()}
    parts = {
        "model": whole(run.model.state_dict(), world),
        "optimizer": whole(moments, world),
        "memory": {name: h for name, h in gathered.items() if h is not None},
    }
    return checkpoints.save(progress.step, parts, meta, score=score) if world.first else None


def restore(run: Run, path: Path) -> None:
    """Continue from the checkpoint; a ValueError names what of it does not fit the run's configuration."""
    meta, parts = run.checkpoints.load(path)
    try:
        _check_fits(run, meta, path)
        load_model(run, parts["model"], path)
        load_optimizer(run, parts["optimizer"], meta["optimizer"])
        _load_state(run, meta, parts["memory"], path)
    except (KeyError, TypeError, AttributeError) as error:  # its digests are right, so somebody wrote it so
        raise ValueError(f"{path} is not what a run saves ({error!r}); choose another checkpoint or --out") from error


def _load_state(run: Run, meta: dict, memory: Part, path: Path) -> None:
    """What is counted, where the data is, and what the layers remember."""
    train = run.config.train
    try:
        run.progress.load(meta["progress"])
        run.guard.load(meta["guard"])
        run.diagnosis.load(meta["diagnosis"])
        run.objective.stream.load(meta["lanes"])
        seen = whole_number("seen", meta["seen"], 0, run.progress.step * train.block)
        if memory:
            _check_memory(memory, run.config.model.layers, [train.batch, run.config.model.dim])
    except ValueError as error:
        raise ValueError(f"{path} is not what a run saves: {error}; choose another checkpoint or --out") from error
    if memory:
        rows = run.world.rows(train.batch)
        hidden = (memory.rows(f"hidden.{n}", rows.start, rows.stop) for n in range(len(memory)))
        # copies: what safetensors reads lies in the mapped file, aligned otherwise, and sums may then round otherwise
        run.state = State(tuple(h.to(run.world.device, copy=True) for h in hidden), seen)


def _check_memory(memory: Part, layers: int, wanted: list[int]) -> None:
    """wanted: [batch, dim] of every layer's hidden states [batch, tokens, dim]."""
    names = {f"hidden.{n}" for n in range(layers)}
    if odd := sorted(names ^ set(memory)):
        raise ValueError(f"the memory has {len(memory)} tensors, expected hidden.0 … {layers - 1} (see {odd[0]})")
    for name in memory:
        shape = list(memory.shape(name))
        if len(shape) != 3 or [shape[0], shape[2]] != wanted:
            raise ValueError(f"the memory {name} has shape {shape}; expected [{wanted[0]}, tokens, {wanted[1]}]")


def load_model(run: Run, part: Part, path: Path) -> None:
    own = run.model.state_dict()
    if wrong := misfit({name: part.shape(name) for name in part}, shapes(own)):
        raise ValueError(f"{path} does not fit this model: {wrong}")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(read_like(part, name, t, run.world))


def load_optimizer(run: Run, part: Part, meta: dict) -> None:
    """Its state, and not its settings: a run may go on with another learning rate."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    # a tensor of the state is named by its parameter, and sharded like it
    like = {name: run.named[parameter] for name in part if (parameter := name.rpartition("/")[0]) in run.named}
    for name, parameter in like.items():
        if part.shape(name) not in (parameter.shape, ()):  # a count of steps is a number
            raise ValueError(
                f"the saved optimiser has {name} in shape {list(part.shape(name))}; expected {list(parameter.shape)}"
            )
    moments = {name: read_like(part, name, like[name], run.world) if name in like else part[name] for name in part}
    unpack_optimizer(run.optimizer, run.named.items(), moments, meta)
    for group, now in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(now)


def _describe(run: Run) -> dict:
    """The plain values of a checkpoint."""
    return {
        "config": as_dict(run.config),
        "model": as_dict(run.config.model),
        "vocab": run.data.vocab.to_json(),
        "unit": run.data.unit,
        "data": _digests(run),
        "progress": run.progress.state(),
        "guard": run.guard.state(),
        "diagnosis": run.diagnosis.state(),
        "lanes": run.objective.stream.state(),
        "seen": run.state.seen if run.state else 0,
        "seed": run.config.train.seed,
    }


def _check_fits(run: Run, meta: dict, path: Path) -> None:
    """Model, data and lanes must be those of the checkpoint; how to train on may change."""
    # built, so that a key of a newer version is refused and one an older version did not have yet has its default
    now, then = as_dict(run.config), as_dict(build(type(run.config), meta["config"], str(path)))
    for section in ("model", "data"):
        _same(
            f"{section}.", now[section], then[section], path, ignore=("cache", "from", "backend", "penalty", "dropout")
        )
    _same("optim.", {"kind": now["optim"]["kind"]}, then["optim"], path, ignore=())
    lanes = {name: now["train"][name] for name in ("batch", "block", "seed")}
    _same("train.", lanes, then["train"], path, ignore=())
    if meta["vocab"] != run.data.vocab.to_json():
        raise ValueError(
            f"{path} was made with another vocabulary than {run.config.data.source} has now; give it the same text, or "
            "begin another run with another --out"
        )
    _check_data(run, meta.get("data"), path)


def _digests(run: Run) -> dict[str, str]:
    """What the data is, by split: digests of its ids."""
    return {name: split.sha256 for name, split in run.data.splits.items()}


def _check_data(run: Run, then: object, path: Path) -> None:
    """A text may change and keep its name, size and vocabulary."""
    source, now = run.config.data.source, _digests(run)
    if not isinstance(then, dict):
        raise ValueError(
            f"{path} does not say which text it was trained on: an older spanformer saved it; begin another run with "
            "another --out"
        )
    if changed := [name for name, digest in now.items() if then.get(name) != digest]:
        raise ValueError(
            f"{path} was made with another text than {source} has now ({', '.join(changed)} changed); give it the same "
            "text, or begin another run with another --out"
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
