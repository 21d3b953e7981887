"""Training from a configuration: lock the folder, prepare the data, run the loop."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch

from spanformer.core.events import Watch
from spanformer.core.malloc import keep_freed_memory
from spanformer.data import Prepared, prepare
from spanformer.model.config import SPECIAL
from spanformer.train.config import RunConfig
from spanformer.train.distributed import World, join_world
from spanformer.train.loop import Result, TrainingLoop, reporter
from spanformer.train.neighbours import find_neighbours
from spanformer.train.objective import valid_ids
from spanformer.train.price import priced
from spanformer.train.run_folder import UNLOCKED, claim_folder


def train(config: RunConfig, *, watch: Watch | None = None) -> Result:
    """Train the configured model into config.out; `watch` receives every event (core/events.py)."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    out = Path(config.out or "out/run")
    with join_world(config.train.device, config.train.engine) as world, contextlib.ExitStack() as held:
        locked = held.enter_context(claim_folder(out, resume=config.resume)) if world.first else True
        world.wait()
        data = prepare_once(config, world, watch)
        config = replace(priced(with_vocab(config, data)), out=str(out))
        if config.model.neighbours:
            if world.first:
                splits = {"train": data.splits["train"].ids, "valid": valid_ids(data, config.train.eval_tokens)}
                find_neighbours(config, data, out, reporter(watch), splits)
            world.wait()
        if config.train.keep_memory and not config.train.checkpointing and world.device.type == "cpu":
            keep_freed_memory(True)
        with TrainingLoop(config, data, world, out, watch) as run:
            return run.go([] if locked else [UNLOCKED])


def prepare_once(config: RunConfig, world: World, watch: Watch | None) -> Prepared:
    """The data; the first process prepares it, then the others load it."""
    data = prepare(config.data, on_progress=reporter(watch)) if world.first else None
    world.wait()
    return data or prepare(config.data)


def with_vocab(config: RunConfig, data: Prepared) -> RunConfig:
    """The configuration with model.vocab set: as given, or the data's tokens plus those that the model adds."""
    needed = data.vocab.size + SPECIAL[config.model.kind]
    config = replace(config, model=replace(config.model, vocab=config.model.vocab or needed))
    if config.model.vocab < needed:
        own = needed - data.vocab.size
        beside = f" and the model adds {own}" if own else ""
        raise ValueError(
            f"model.vocab is {config.model.vocab}; the data has {data.vocab.size} tokens{beside}, so expected at "
            "least that"
        )
    return config
