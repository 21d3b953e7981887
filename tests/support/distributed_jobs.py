"""Runs of one training each, several in a row in one process group: starting processes is most of what they cost.

    torchrun --nproc-per-node 2 tests/support/distributed_jobs.py JOBS.json

A job is {"config": a RunConfig as JSON, "resume": a checkpoint to begin from, or nothing}. Every process writes what it
holds at the end beside the run's checkpoints: process-RANK.json.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch

from spanformer.core.fields import build
from spanformer.train.config import RunConfig
from spanformer.train.distributed import join_world
from spanformer.train.loop import TrainingLoop
from spanformer.train.run import prepare_once, with_vocab


def run_job(job: dict) -> None:
    config = build(RunConfig, job["config"], "job")
    torch.set_num_threads(1)
    with join_world("cpu", config.train.engine) as world:
        out = Path(config.out)
        if job.get("resume"):
            start = Path(job["resume"])
            if world.first:
                shutil.copytree(start, out / "checkpoints" / start.name)
            config = dataclasses.replace(config, resume=True)
        world.wait()
        data = prepare_once(config, world, None)
        with TrainingLoop(with_vocab(config, data), data, world, out, None) as run:
            run.go()
            held = {
                "engine": world.engine,
                "ratios": [m.ratio.tolist() for m in run.model.spans_modules()],
                "memory": [list(h.shape) for h in run.state.tensors().values()] if run.state else [],
                "parameters": sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in run.model.parameters()),
            }
        (out / f"process-{world.rank}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        run_job(job)
