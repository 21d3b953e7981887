"""One training run in one process: start or resume, take steps, evaluate, save, end; log every event."""

from __future__ import annotations

import functools
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spanformer.core.events import (
    FILE,
    CheckpointEvent,
    EvalEvent,
    Event,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    SkipEvent,
    StepsEvent,
    StopEvent,
    Watch,
)
from spanformer.core.progress import OnProgress, silent
from spanformer.data import Prepared
from spanformer.model.lm import LM, State
from spanformer.model.load import MODELS
from spanformer.model.span_budget import make_budget
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig
from spanformer.train.diagnose import Diagnosis
from spanformer.train.distributed import World, wrap
from spanformer.train.dynamic_event import depth_event, dynamic_event
from spanformer.train.event_log import EventLog
from spanformer.train.guard import Guard, TooManySkips
from spanformer.train.measure import cost_event
from spanformer.train.memory_check import check_memory
from spanformer.train.objective import NextToken, make_objective
from spanformer.train.optim import clip_model, model_optimizer, set_lr
from spanformer.train.progress import Progress, schedule_factor
from spanformer.train.resume import restore, save, start_from
from spanformer.train.run_events import learned_spans, start_event, step_event
from spanformer.train.run_folder import BOARD, put_aside
from spanformer.train.signals import SIGNALS, SignalCatcher
from spanformer.train.step import backward


@dataclass(frozen=True)
class Result:
    out: Path
    reason: str
    """why the run ended"""
    steps: int
    bits: float | None
    """validation bits per unit of the last evaluation"""
    signal: int
    """the signal that ended it, or 0"""


def reporter(watch: Watch | None) -> OnProgress:
    """A progress callback that sends ProgressEvents to the watcher."""
    if watch is None:
        return silent
    return lambda title, done, total: watch(ProgressEvent(title, done, total))


class TrainingLoop:
    """Expects config.model.vocab to be set. Only the first process writes files and calls `watch`."""

    def __init__(self, config: RunConfig, data: Prepared, world: World, out: Path, watch: Watch | None) -> None:
        t = config.train
        self.config, self.data, self.world, self.out = config, data, world, out
        self.watch = watch if world.first else None
        self.report = reporter(self.watch)
        check_memory(config, world)
        torch.manual_seed(t.seed)
        self.model = MODELS[config.model.kind](config.model).to(world.device)
        self.model.checkpointing = t.checkpointing
        if t.compile:
            self.model.compile_feedforwards()
        self.engine = wrap(self.model, world)
        self.budget = make_budget(self.model, world.mean)
        self.named = dict(self.model.named_parameters())
        self.optimizer = model_optimizer(self.model, config.optim)
        self.objective = make_objective(data, config, world.rows(t.batch))
        if (t.batch // world.size) % t.grad_accum_steps:
            raise ValueError(
                f"train.grad_accum_steps is {t.grad_accum_steps}; expected a divisor of the lanes per process, "
                f"{t.batch // world.size}"
            )
        self.state: State | None = None
        self.progress = Progress()
        self.guard = Guard(t.spike, t.max_skips)
        self.checkpoints = Checkpoints(out / "checkpoints", keep=t.keep)
        self.diagnosis = Diagnosis(config, learned_spans(self.model))
        self.unsaved = True
        """whether the run has changed since the last checkpoint"""
        self.signals = SignalCatcher()

    def __enter__(self) -> TrainingLoop:
        t = self.config.train
        self._damaged: list[str] = []
        looks = self.config.resume and self.world.first  # only the first, since it also removes leftovers
        found = self.checkpoints.newest(self._damaged.append) if looks else None
        if self._damaged and found is None:
            raise ValueError(f"no checkpoint is complete: {'; '.join(self._damaged)}; choose another --out")
        path = self.world.broadcast(str(found or ""))
        self._found = Path(path) if path else None
        board = {"auto": "auto", "on": self.out / BOARD, "off": None}[t.tensorboard]
        self._aside, self.log = None, None
        if self.world.first:
            self._aside = put_aside(self.out) if self._found is None else None
            self.log = EventLog(self.out / FILE, board)
        self.signals.start()
        return self

    def __exit__(self, *_exception) -> None:
        del self.engine  # before its process group ends: see join_world
        self.signals.stop()
        if self.log is not None:
            self.log.close()

    def go(self, notes: Sequence[str] = ()) -> Result:
        """Run to the end. notes: logged after the start or resume event."""
        reason = self._begin()
        self._log_notes(notes)
        while not reason:
            reason = self._one_step() or self._between_steps()
        return self._end(reason)

    def log_event(self, event: Event) -> None:
        """In the first process, write the event and pass it to the watcher."""
        if self.log is not None:
            self.log.write(event)
        if self.watch is not None:
            self.watch(event)

    def _log_notes(self, texts: Sequence[str]) -> None:
        for text in texts:
            self.log_event(NoteEvent(self.progress.step, text))

    def _show_steps(self) -> None:
        """Send the number of finished steps to the watcher only."""
        if self.watch is not None:
            self.watch(StepsEvent(self.progress.step, self.progress.seconds))

    def _begin(self) -> str:
        """Start or resume; returns why no step remains, or ''."""
        if self._found is None:
            if self.config.train.start:
                start_from(self, self.config.train.start)
            self.log_event(start_event(self))
            if self._aside is not None:
                where = f"files of the earlier attempt are in {self._aside}"
                self._log_notes([f"no checkpoint to resume from: the run starts again; {where}"])
            self._evaluate()
            return ""
        restore(self, self._found)
        p = self.progress
        self.log_event(ResumeEvent(p.step, str(self._found), self.data.unit, p.seconds))
        self._show_steps()
        self._log_notes(self._damaged)
        self.unsaved = False
        return self._over(p.seconds) or self._between_steps()

    def _one_step(self) -> str:
        """Take or skip one step; returns why the run ends after it, or ''."""
        t, p, world = self.config.train, self.progress, self.world
        began = time.perf_counter()
        batch = self.objective.draw()
        # dropout depends only on seed, step and process, so checkpoints need no random state
        torch.manual_seed((t.seed * 1_000_003 + p.step) * 4096 + world.rank)
        self.optimizer.zero_grad(set_to_none=True)
        before = None if batch.reset else self.state
        losses, state = backward(
            self.engine, self.model, world, batch, before, grad_accum_steps=t.grad_accum_steps, dtype=t.dtype
        )
        slopes = None if self.budget is None else self.budget.slopes()
        norm = clip_model(self.model, self.config.optim.global_clip)
        clock = p.seconds + time.perf_counter() - began
        numbers = torch.stack([losses.loss, losses.penalty, norm]).double()
        numbers = torch.cat(
            [numbers, torch.tensor([clock, self.signals.caught], dtype=torch.float64, device=world.device)]
        )
        loss, penalty, grad_norm, clock, signalled = world.mean(numbers).tolist()  # the only wait for the device
        p.step += 1
        p.tokens += batch.tokens
        self.unsaved = True
        refused = self.guard.refuses(loss, grad_norm)
        if refused is None:
            set_lr(self.optimizer, schedule_factor(self.config, p.step - 1, clock))
            self.optimizer.step()
            self.model.after_step()
            if self.budget is not None:
                self.budget.after_step(slopes)
            self.state = state
            p.add(loss, penalty)
        else:
            self.state = None  # it may hold values that are not finite
        p.seconds += time.perf_counter() - began
        if refused is not None:
            self._skip(refused)
        reason = self._over(clock)
        if p.step % t.log_every == 0 or reason:
            self._log_step(grad_norm)
        self._show_steps()
        # a signal leaves the averaging window open: a resumed run continues it
        return reason or (signal.Signals(self.signals.caught or signal.SIGTERM).name if signalled else "")

    def _over(self, seconds: float) -> str:
        """Why the run ends, or ''."""
        t = self.config.train
        if self.progress.step >= t.steps:
            return "all steps done"
        return f"{t.minutes:g} minutes have passed" if 0 < t.minutes * 60 <= seconds else ""

    def _skip(self, refused: str) -> None:
        p = self.progress
        self.log_event(SkipEvent(p.step, refused))
        try:
            self.guard.count(refused)
        except TooManySkips as error:
            good = self.checkpoints.newest(lambda text: None)
            where = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
            self.log_event(StopEvent(p.step, str(error), p.seconds))
            raise ValueError(f"stopped at step {p.step:,}: {error}; {where}") from None

    def _between_steps(self) -> str:
        """Evaluate and save when due; returns why the run ends here, or ''."""
        t, p = self.config.train, self.progress
        if t.eval_every and p.step % t.eval_every == 0 and p.scored_at != p.step:
            self._evaluate()
        if t.patience and p.stale >= t.patience:  # also when a run that ended this way is resumed
            return f"{p.stale} evaluation{'s' if p.stale > 1 else ''} brought no improvement"
        if t.save_every and p.step % t.save_every == 0 and self.unsaved:
            self._save()
        return ""

    def _log_step(self, grad_norm: float) -> None:
        self.log_event(step_event(self, grad_norm))
        self.progress.clear()
        advice = self.diagnosis.advice(self.model.advice())
        share = math.nan if self.budget is None else self.budget.share_now()
        self._log_notes([*self.diagnosis.check(self.progress.step, learned_spans(self.model), share), *advice])

    def _evaluate(self) -> None:
        """Measure bits per unit and exactness on the validation split."""
        self.report("evaluating", 0, 0)
        p, depth = self.progress, self.model.depth
        if depth is not None:
            depth.count_from_here()
        score = self.objective.evaluate(self.model, functools.partial(self.report, "evaluating"))
        nats = torch.tensor(score.nats, dtype=torch.float64, device=self.world.device)
        score = score._replace(nats=float(self.world.mean(nats)))  # equal in all processes, so that they decide alike
        exact = math.nan if score.exact is None else score.exact
        layers = math.nan if depth is None else depth.mean_run()
        self.log_event(EvalEvent(p.step, p.seconds, "valid", score.loss, score.bits, score.tokens, exact, layers))
        p.take_score(score.bits)
        self.unsaved = True
        self._show_steps()

    def _save(self) -> None:
        self.report("writing a checkpoint", 0, 0)
        path = save(self)
        self.log_event(CheckpointEvent(self.progress.step, str(path)))
        self.unsaved = False
        self.world.wait()
        self._show_steps()

    def _end(self, reason: str) -> Result:
        p = self.progress
        number = next((int(s) for s in SIGNALS if s.name == reason), 0)
        if not number and p.scored_at != p.step:
            self._evaluate()
        if self.unsaved:
            self._save()
        if not number and self.world.size == 1:
            self._measure()
        self.log_event(StopEvent(p.step, reason, p.seconds))
        return Result(self.out, reason, p.step, p.latest, number)

    def _measure(self) -> None:
        """Measure the cost of a step and, for a language model, its dynamic spans and layers along a text."""
        t, objective = self.config.train, self.objective
        if t.measure and self.world.device.type == "cpu":
            self.report("measuring the cost of a step", 0, 0)
            self.log_event(cost_event(self.model, objective.draw(), self.config, self.progress.step))
        if not isinstance(self.model, LM) or not isinstance(objective, NextToken) or objective.near is not None:
            return
        for along in (dynamic_event, depth_event):
            found = along(self.model, objective.valid_ids[: 4 * t.block], self.data.vocab, self.progress.step)
            if found is not None:
                self.log_event(found)
