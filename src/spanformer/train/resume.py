"""Saves and restores everything that a run needs to continue exactly where it was.

Every tensor is saved under its name with its rows: segment memories for the lanes of all processes, sharded weights
whole or as shards. So a run saved by one number of processes can continue with another. Dropout needs no saved state:
it is sampled from seed and step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spanformer.core.checks import whole_number
from spanformer.core.fields import as_dict, build
from spanformer.model.folder import faults, open_part, read_meta
from spanformer.model.lm import LM, State
from spanformer.model.load import model_folder
from spanformer.model.part import Part
from spanformer.model.span_budget import make_budget
from spanformer.model.weights import misfit, shapes
from spanformer.train.checkpoint import pack_optimizer, unpack_optimizer
from spanformer.train.diagnose import Diagnosis
from spanformer.train.run_events import learned_spans
from spanformer.train.sharded import Held, own, read_like, whole, write_shards

if TYPE_CHECKING:
    from spanformer.train.loop import TrainingLoop


def save(run: TrainingLoop) -> Path | None:
    """Save a checkpoint of the run. Every process must call it; the first gets the path."""
    world, checkpoints, progress = run.world, run.checkpoints, run.progress
    moments, hyper = pack_optimizer(run.optimizer, run.named.items())
    memory = run.state.tensors() if run.state else {}
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


def restore(run: TrainingLoop, path: Path) -> None:
    """Continue from the checkpoint; a ValueError names the first mismatch with the run's configuration."""
    meta, parts = run.checkpoints.load(path)
    try:
        _check_fits(run, meta, path)
        load_model(run, parts["model"], path)
        load_optimizer(run, parts["optimizer"], meta["optimizer"])
        _load_state(run, meta, parts["memory"], path)
    except (KeyError, TypeError, AttributeError) as error:  # its digests are valid, so it was written this way
        raise ValueError(f"{path} is not a run's checkpoint ({error!r}); choose another checkpoint or --out") from error


def start_from(run: TrainingLoop, path: str) -> None:
    """Begin with the weights of another model, spans included; all else begins anew."""
    folder = model_folder(path)
    if found := faults(folder):
        raise ValueError(f"train.start is {path}, which is damaged or incomplete: {'; '.join(found)}; choose another")
    if read_meta(folder).get("vocab", run.data.vocab.to_json()) != run.data.vocab.to_json():
        raise ValueError(
            f"train.start is {path}, whose vocabulary is not that of {run.config.data.source}; expected a model of the "
            "same tokens (bytes always are)"
        )
    load_model(run, open_part(folder, "model"), folder)
    run.budget = make_budget(run.model, run.world.mean)  # the spans are others now
    run.diagnosis = Diagnosis(run.config, learned_spans(run.model))


def _load_state(run: TrainingLoop, meta: dict, memory: Part, path: Path) -> None:
    """Restore the counters, the position in the data and the segment memory."""
    train = run.config.train
    try:
        run.progress.load(meta["progress"])
        run.guard.load(meta["guard"])
        run.diagnosis.load(meta["diagnosis"])
        if run.budget is not None and meta.get("budget"):  # none: the run gets a budget only now
            run.budget.load(meta["budget"])
        run.objective.stream.load(meta["lanes"])
        seen = whole_number("seen", meta["seen"], 0, run.progress.step * train.block)
        if memory:
            _check_memory(memory, _empty(run, 0), train.batch)
    except ValueError as error:
        raise ValueError(f"{path} is not a run's checkpoint: {error}; choose another checkpoint or --out") from error
    if memory:
        rows = run.world.rows(train.batch)
        held = {name: memory.rows(name, rows.start, rows.stop) for name in memory}
        # copy: safetensors returns views of the mapped file with another alignment, and sums may then round differently
        held = {name: t.to(run.world.device, copy=True) for name, t in held.items()}
        run.state = _empty(run, len(range(rows.start, rows.stop))).with_tensors(held, seen)


def _empty(run: TrainingLoop, batch: int) -> State:
    """The empty segment memory for this many lanes."""
    if not isinstance(run.model, LM):
        raise ValueError("it holds a segment memory, which only language models have")
    return run.model.start(batch)


def _check_memory(memory: Part, empty: State, batch: int) -> None:
    """Check that the tensors match such a state with `batch` rows; hidden states [batch, tokens, dim] may have any
    number of tokens."""
    wanted = empty.tensors()
    if odd := sorted(set(wanted) ^ set(memory)):
        raise ValueError(f"the segment memory has {len(memory)} tensors; expected {len(wanted)} (see {odd[0]})")
    for name, t in wanted.items():
        any_length = 1 if name.endswith(".hidden") else None
        expected = [batch, *("tokens" if n == any_length else size for n, size in enumerate(t.shape) if n)]
        shape = list(memory.shape(name))
        fits = len(shape) == len(expected) and all(b in ("tokens", a) for a, b in zip(shape, expected, strict=True))
        if not fits:
            raise ValueError(f"the segment memory {name} has shape {shape}; expected [{', '.join(map(str, expected))}]")


def load_model(run: TrainingLoop, part: Part, path: Path) -> None:
    own = run.model.state_dict()
    if wrong := misfit({name: part.shape(name) for name in part}, shapes(own)):
        raise ValueError(f"{path} does not fit this model: {wrong}")
    with torch.no_grad():
        for name, t in own.items():
            t.copy_(read_like(part, name, t, run.world))


def load_optimizer(run: TrainingLoop, part: Part, meta: dict) -> None:
    """Load the optimiser's state but not its settings: a run may continue with another learning rate."""
    settings = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    # a state tensor has the name and the sharding of its parameter
    like = {name: run.named[parameter] for name in part if (parameter := name.rpartition("/")[0]) in run.named}
    for name, parameter in like.items():
        if part.shape(name) not in (parameter.shape, ()):  # a step count is a scalar
            raise ValueError(
                f"the saved optimiser has {name} in shape {list(part.shape(name))}; expected {list(parameter.shape)}"
            )
    moments = {name: read_like(part, name, like[name], run.world) if name in like else part[name] for name in part}
    unpack_optimizer(run.optimizer, run.named.items(), moments, meta)
    for group, now in zip(run.optimizer.param_groups, settings, strict=True):
        group.update(now)


def _describe(run: TrainingLoop) -> dict:
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
        "budget": None if run.budget is None else run.budget.state(),
        "lanes": run.objective.stream.state(),
        "seen": run.state.seen if run.state else 0,
        "seed": run.config.train.seed,
    }


def _check_fits(run: TrainingLoop, meta: dict, path: Path) -> None:
    """Model, data and lanes must match the checkpoint; training settings may change."""
    # `build` refuses keys of a newer version and fills in defaults for keys that an older version lacked
    now, then = as_dict(run.config), as_dict(build(type(run.config), meta["config"], str(path)))
    free = ("cache", "from", "backend", "penalty", "budget", "dropout")
    for section in ("model", "data"):
        _same(f"{section}.", now[section], then[section], path, ignore=free)
    _same("optim.", {"kind": now["optim"]["kind"]}, then["optim"], path, ignore=())
    lanes = {name: now["train"][name] for name in ("batch", "block", "seed")}
    _same("train.", lanes, then["train"], path, ignore=())
    if meta["vocab"] != run.data.vocab.to_json():
        raise ValueError(
            f"{path} was made with another vocabulary than {run.config.data.source} has now; use the same text, or "
            "start another run with another --out"
        )
    _check_data(run, meta.get("data"), path)


def _digests(run: TrainingLoop) -> dict[str, str]:
    """Digests of the ids of each split."""
    return {name: split.sha256 for name, split in run.data.splits.items()}


def _check_data(run: TrainingLoop, then: object, path: Path) -> None:
    """Compare digests: a text may change and keep its name, size and vocabulary."""
    source, now = run.config.data.source, _digests(run)
    if not isinstance(then, dict):
        raise ValueError(
            f"{path} has no digest of its training text: an older spanformer saved it; start another run with "
            "another --out"
        )
    if changed := [name for name, digest in now.items() if then.get(name) != digest]:
        raise ValueError(
            f"{path} was made with another text than {source} has now ({', '.join(changed)} changed); use the same "
            "text, or start another run with another --out"
        )


def _same(where: str, now: dict, then: dict, path: Path, ignore: tuple[str, ...]) -> None:
    for key, value in now.items():
        before = then.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            _same(f"{where}{key}.", value, before, path, ignore)
        elif key not in ignore and value != before:
            raise ValueError(
                f"{path} was made with {where}{key} = {before!r}, but this run has {value!r}; change it back, or start "
                "another run with another --out"
            )
