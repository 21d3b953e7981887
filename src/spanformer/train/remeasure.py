"""Measures the cost of a step of a trained run again: times are valid only if nothing else ran meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from spanformer.core.events import FILE
from spanformer.core.malloc import keep_freed_memory
from spanformer.data import prepare
from spanformer.model.load import load_any
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig
from spanformer.train.event_log import EventLog
from spanformer.train.measure import cost_event
from spanformer.train.objective import make_objective
from spanformer.train.run_folder import hold_folder


def measure_again(config: RunConfig, step: int) -> None:
    """Append a cost event to the run in config.out, which was trained on a CPU for `step` steps. Reports use the last
    one."""
    t, out = config.train, Path(config.out)
    if t.threads:
        torch.set_num_threads(t.threads)
    if t.keep_memory and not t.checkpointing:
        keep_freed_memory(True)
    with hold_folder(out):
        path = Checkpoints(out / "checkpoints", keep=t.keep).newest(lambda _bad: None)
        if path is None:
            raise ValueError(f"{out} holds no complete checkpoint; train it again in another folder")
        model = load_any(path).train()
        model.checkpointing = t.checkpointing
        batch = make_objective(prepare(config.data), replace(config, model=model.config), slice(0, t.batch)).draw()
        with EventLog(out / FILE, None) as log:
            log.write(cost_event(model, batch, config, step))
