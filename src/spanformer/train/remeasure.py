"""Measures a trained run again: the cost of a step, which is valid only if nothing else runs meanwhile, and bits of the
test split. Both are appended to the run's events; reports use the last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from spanformer.core.events import FILE, EvalEvent
from spanformer.core.malloc import keep_freed_memory
from spanformer.core.progress import OnCount
from spanformer.data import prepare
from spanformer.model.load import load_any, load_meta
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig
from spanformer.train.event_log import EventLog
from spanformer.train.measure import cost_event
from spanformer.train.objective import make_objective
from spanformer.train.run_folder import hold_folder


def measure_again(config: RunConfig, step: int) -> None:
    """Append a cost event to the run in config.out, which was trained on a CPU for `step` steps."""
    t, out = config.train, Path(config.out)
    with _held(config):
        path = Checkpoints(out / "checkpoints", keep=t.keep).newest(lambda _bad: None)
        if path is None:
            raise ValueError(f"{out} holds no complete checkpoint; train it again in another folder")
        model = load_any(path).train()
        model.checkpointing = t.checkpointing
        batch = make_objective(prepare(config.data), replace(config, model=model.config), slice(0, t.batch)).draw()
        with EventLog(out / FILE, None) as log:
            log.write(cost_event(model, batch, config, step))


def measure_test(config: RunConfig, tokens: int, known: Sequence[EvalEvent], on_progress: OnCount) -> None:
    """Append an evaluation of the run's best checkpoint on the first `tokens` of the test split, read as the validation
    split is in training. known: the run's evaluations, among which it may already be."""
    out = Path(config.out)
    with _held(config):
        meta, data = load_meta(out), prepare(config.data)
        step, test = int(meta["step"]), data.splits["test"]
        asked = min(tokens, test.tokens)
        if any((row.split, row.step, row.tokens) == ("test", step, asked) for row in known):
            return
        if (meta.get("data") or {}).get("test", test.sha256) != test.sha256:
            raise ValueError(
                f"{out} was trained beside another test split than {config.data.source} has now; train again"
            )
        model = load_any(out)
        settings = replace(config, model=model.config, train=replace(config.train, eval_tokens=asked))
        as_valid = replace(data, splits=data.splits | {"valid": test})
        score = make_objective(as_valid, settings, slice(0, config.train.batch)).evaluate(model, on_progress)
        nan = float("nan")
        with EventLog(out / FILE, None) as log:
            log.write(EvalEvent(step, float(meta["progress"]["seconds"]), "test", score.loss, score.bits, score.tokens,
                                nan if score.exact is None else score.exact))  # fmt: skip


@contextlib.contextmanager
def _held(config: RunConfig) -> Iterator[None]:
    """Lock the run's folder, with the threads and the memory of its training."""
    t = config.train
    if t.threads:
        torch.set_num_threads(t.threads)
    if t.keep_memory and not t.checkpointing:
        keep_freed_memory(True)
    with hold_folder(Path(config.out)):
        yield
