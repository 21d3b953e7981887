"""Train a small model within a benchmark, with its progress."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from spanformer.bench.session import Bench, BenchOptions
from spanformer.core.events import ProgressEvent, StepsEvent
from spanformer.model.lm import LM
from spanformer.model.load import load
from spanformer.train.config import RunConfig
from spanformer.train.run import train

Options = TypeVar("Options", bound=BenchOptions)


def trained(bench: Bench[Options], config: RunConfig, out: Path, title: str, *, resume: bool = False) -> LM:
    """The best checkpoint of a run into `out`, which is removed first, or continued with `resume`."""
    if not resume:
        shutil.rmtree(out, ignore_errors=True)

    def watch(event: object) -> None:
        if isinstance(event, ProgressEvent):
            bench.report(event.title, event.done, event.total)
        elif isinstance(event, StepsEvent):
            bench.report(f"training {title}", event.step, config.train.steps)

    if train(replace(config, out=str(out), resume=resume), watch=watch).signal:
        raise KeyboardInterrupt
    return load(out)
