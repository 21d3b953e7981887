"""The first row of a run's events: what it is, on what it runs, and the shape that costs are counted from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from spanformer.core.version import VERSION
from spanformer.model.fields import as_dict

if TYPE_CHECKING:
    from spanformer.train.run import Run

EVENTS_FORMAT = 1


def start_event(run: Run) -> dict:
    splits = run.data.splits
    return {
        "format": EVENTS_FORMAT,
        "version": VERSION,
        "run": run.out.name,
        "config": as_dict(run.config),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "unit": run.data.unit,
        "objective": run.config.model.kind,
        "tokens": {name: s.tokens for name, s in splits.items()},
        "units": {name: s.units for name, s in splits.items()},
        "shape": shape_of(run),
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": str(run.world.device),
            "torch": torch.__version__,
            "processes": run.world.size,
        },
    }


def shape_of(run: Run) -> dict:
    """The fields of cost.model.Shape."""
    m, t = run.config.model, run.config.train
    feedforward = run.model.layers()[0].feedforward
    return {
        "layers": len(run.model.layers()),
        "dim": m.dim,
        "heads": m.heads,
        "kv_heads": m.groups,
        "head_dim": m.head_dim,
        "feedforward": feedforward.weights_per_token if feedforward is not None else 0,  # pyright: ignore
        "persistent": m.persistent,
        "vocab": m.vocab,
        "block": t.block,
        "batch": t.batch,
        "max_span": m.max_span,
    }
