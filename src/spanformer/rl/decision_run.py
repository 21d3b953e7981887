"""One run of learning from recorded episodes: start or resume, step, save, ask for returns, end; log every event."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from spanformer.core.events import CheckpointEvent, NoteEvent, ProgressEvent, ResumeEvent, StopEvent, Watch
from spanformer.core.fields import as_dict
from spanformer.core.policy_events import AskedEvent, ImitateEvent, ImitationStartEvent
from spanformer.core.version import VERSION
from spanformer.memory import State
from spanformer.rl.decision import DecisionTransformer, Steps, Task
from spanformer.rl.decision_config import ImitationConfig
from spanformer.rl.decision_data import Recorded, Streams
from spanformer.rl.decision_play import Asked, Cached, Context, Outcome, Window, play
from spanformer.rl.decision_saving import make_model, restore, save, sizes
from spanformer.rl.envs.batch import BatchEnv
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.logged_run import LoggedRun, run_in
from spanformer.rl.memory import Segments, compact
from spanformer.rl.trajectories import About, read_trajectories
from spanformer.train.optim import clip_global, lr_at, make_optimizer, set_lr
from spanformer.train.run_events import describe_machine

EVAL_ROWS = 100


@dataclass(frozen=True)
class Imitated:
    out: Path
    reason: str
    """why the run ended"""
    steps: int
    asked: list[AskedEvent]
    """the final evaluation, for each target"""
    signal: int
    """the signal that ended it, or 0"""


def imitate(config: ImitationConfig, *, watch: Watch | None = None) -> Imitated:
    """Train the configured model into config.out; `watch` receives every event."""
    if config.imitate.threads:
        torch.set_num_threads(config.imitate.threads)
    out = Path(config.out or "out/imitate")
    return run_in(out, config.resume, lambda: ImitationRun(config, out, watch))


class ImitationRun(LoggedRun):
    def __init__(self, config: ImitationConfig, out: Path, watch: Watch | None) -> None:
        c = config.imitate
        super().__init__(out, watch, c.keep)
        self.config = config
        whole = read_trajectories(c.data)
        self.returns = [float(each(whole.returns)) for each in (np.min, np.mean, np.max)]
        self.data = whole.best(c.top) if c.top < 1 else whole
        self.optim = replace(config.optim, warmup=min(config.optim.warmup, c.steps // 10))
        about = self.data.about
        task = Task(self.data.observation.shape[1], about.actions, about.continuous, int(whole.lengths.max()))
        self.model = make_model(config, task)
        mean, std = (torch.from_numpy(each(self.data.observation, 0)) for each in (np.mean, np.std))
        scale = c.scale or float(np.abs(self.data.returns_to_go).max()) or 1.0
        self.model.fit_data(mean, std, scale)
        self.named = dict(self.model.named_parameters())
        spans = {id(module.ratio) for module in self.model.stack.spans_modules()}
        self.optimizer = make_optimizer(self.named.items(), self.optim, lambda name: id(self.named[name]) in spans)
        self.env = None
        if c.eval_episodes:
            rows = min(EVAL_ROWS, c.eval_episodes)
            self.env = make_batch(about.env, rows, about.length, continuous=about.continuous)
            check_env(self.env, task, about, c.data)
        self.recorded = Recorded(self.data)
        self.streams = Streams(self.recorded, c.batch)
        self.state: State | None = None
        """the memory of rows that run through episodes"""
        self.steps, self.seconds, self.saved_at = 0, 0.0, -1
        self.since: list[torch.Tensor] = []
        """loss, penalty and norm of each step since the last row"""

    def go(self, notes: list[str]) -> Imitated:
        self._begin(notes)
        c = self.config.imitate
        while self.steps < c.steps and not self.signals.caught:
            self._one_step()
            if self.steps % c.log_every == 0 or self.steps == c.steps:
                self._log_steps()
            if c.save_every and self.steps % c.save_every == 0:
                self._save()
        return self._end()

    def _begin(self, notes: list[str]) -> None:
        found, damaged = self.newest_checkpoint(self.config.resume)
        if found is not None:
            restore(self, found)
        earlier = self.open_log(found, self.config.imitate.tensorboard)
        if found is None:
            parameters = sum(p.numel() for p in self.model.parameters())
            self.log_event(
                ImitationStartEvent(
                    0, self.out.name, as_dict(self.config), parameters, self.data.about.env, len(self.data),
                    self.data.steps, self.returns, describe_machine("cpu", 1), VERSION,
                )
            )  # fmt: skip
        else:
            self.saved_at = self.steps
            self.log_event(ResumeEvent(self.steps, str(found), seconds=self.seconds))
        for text in [*notes, *damaged, *earlier]:
            self.log_event(NoteEvent(self.steps, text))

    def _batch(self) -> Steps:
        c = self.config.imitate
        # chance depends on seed and step only, so a checkpoint needs no random state
        random = np.random.default_rng((c.seed, self.steps))
        torch.manual_seed(c.seed * 1_000_003 + self.steps)
        if c.context == "episode":
            return self.streams.segment(random, c.window)
        return self.recorded.windows(random, c.batch, c.window)

    def _one_step(self) -> None:
        began, batch = time.perf_counter(), self._batch()
        self.model.train()
        found = self.model(batch, self.state)
        loss = self.model.loss(found, batch)
        self.optimizer.zero_grad(set_to_none=True)
        (loss + found.penalty).backward()
        norm = clip_global(self.model.parameters(), self.config.optim.global_clip)
        if not torch.isfinite(norm):
            self.log_event(StopEvent(self.steps, "the gradient is not finite", self.seconds))
            raise ValueError(
                f"stopped at step {self.steps + 1:,}: the gradient is not finite; choose a smaller optim.lr"
            )
        set_lr(self.optimizer, lr_at(self.optim, self.steps, self.config.imitate.steps))
        self.optimizer.step()
        self.model.after_step()
        if self.config.imitate.context == "episode":
            kept = compact(Segments(found.state))
            assert isinstance(kept, Segments)
            self.state = kept.state
        self.since.append(torch.stack([loss.detach(), found.penalty.detach(), norm]))
        self.steps += 1
        self.seconds += time.perf_counter() - began
        if self.watch is not None:
            self.watch(ProgressEvent(f"step {self.steps:,}", self.steps, self.config.imitate.steps))

    def _log_steps(self) -> None:
        loss, penalty, norm = torch.stack(self.since).mean(0).tolist()
        spans = self.model.stack.spans()
        known = [z for layer in spans for z in layer if z is not None]
        average = sum(known) / len(known) if known else math.nan
        self.log_event(
            ImitateEvent(
                self.steps, self.seconds, loss, penalty, norm, self.optimizer.param_groups[0]["lr"], average,
                spans if known else [],
            )
        )  # fmt: skip
        self.since = []

    def _save(self) -> None:
        if self.since:  # a resumed run must log the same rows
            self._log_steps()
        self.log_event(CheckpointEvent(self.steps, str(save(self))))
        self.saved_at = self.steps

    def _end(self) -> Imitated:
        if self.saved_at != self.steps:
            self._save()
        number, asked = self.signals.caught, []
        reason = signal.Signals(number).name if number else "all steps done"
        c = self.config.imitate
        if not number and self.env is not None:
            env = self.env
            for target in targets_of(self.config, self.returns):
                outcome = ask(
                    self.model, self.config, env, target, c.eval_episodes, c.seed + 10_000, greedy=not c.sample,
                    watch=self.watch,
                )  # fmt: skip
                asked.append(asked_event(self.steps, env.name, outcome))
                self.log_event(asked[-1])
        self.log_event(StopEvent(self.steps, reason, self.seconds))
        return Imitated(self.out, reason, self.steps, asked, number)


def check_env(env: BatchEnv, task: Task, about: About, path: str) -> None:
    """Refuse data whose sizes are not those of its environment."""
    here = replace(task, observation=env.observation, actions=env.actions)
    if here != task:
        raise ValueError(
            f"{path} has {sizes(task)}; its environment {about.env} has {sizes(here)}: expected the same, or "
            "imitate.eval_episodes 0"
        )


def targets_of(config: ImitationConfig, returns: list[float]) -> list[float]:
    """The returns to ask for; NaN for cloning, which is asked for nothing."""
    if config.imitate.method == "cloning":
        return [math.nan]
    return list(config.imitate.targets) or [returns[-1]]


def contexts(model: DecisionTransformer, config: ImitationConfig) -> Callable[[int], Context]:
    """What makes the context of this many rows at play: windows or whole episodes, as in training."""
    if config.imitate.context == "episode":
        return lambda rows: Cached(model, rows)
    return lambda rows: Window(model, rows, config.imitate.window)


def ask(
    model: DecisionTransformer, config: ImitationConfig, env: BatchEnv, target: float | Asked, episodes: int, seed: int,
    *, greedy: bool = True, watch: Watch | None = None,
) -> Outcome:  # fmt: skip
    """Whole episodes; target: a return, or what to ask for by the first observations."""
    asked = target if callable(target) else lambda first: np.full(len(first), target)
    title = f"playing {env.name}" + ("" if callable(target) or math.isnan(target) else f", asked for {target:g}")

    def on_episode(done: int) -> None:
        if watch is not None:
            watch(ProgressEvent(title, done, episodes))

    on_episode(0)
    new = contexts(model.eval(), config)
    return play(model, env, new, asked, episodes, seed=seed, greedy=greedy, on_episode=on_episode)


def asked_event(step: int, env: str, found: Outcome) -> AskedEvent:
    known = found.success[~np.isnan(found.success)]
    return AskedEvent(
        step, env, float(found.asked.mean()), len(found.returns), float(found.returns.mean()),
        float(found.returns.std()), float(found.lengths.mean()), float(known.mean()) if len(known) else math.nan,
    )  # fmt: skip
