"""One run of PPO: start or resume, play and update in turn, save, evaluate, end; log every event."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from spanformer.core.events import (
    CheckpointEvent,
    NoteEvent,
    ProgressEvent,
    ResumeEvent,
    StopEvent,
    Watch,
)
from spanformer.core.fields import as_dict
from spanformer.core.policy_events import PlayEvent, PolicyStartEvent, UpdateEvent
from spanformer.core.version import VERSION
from spanformer.rl.config import RLConfig
from spanformer.rl.envs.gym import make_batch
from spanformer.rl.logged_run import LoggedRun, run_in
from spanformer.rl.ppo import Losses, update
from spanformer.rl.rollout import Actor, Episodes, play_episodes
from spanformer.rl.saving import make_policy, restore, save
from spanformer.train.optim import lr_at, make_optimizer, set_lr
from spanformer.train.run_events import describe_machine

EVAL_ROWS = 50


@dataclass(frozen=True)
class Result:
    out: Path
    reason: str
    """why the run ended"""
    updates: int
    played: PlayEvent | None
    """the final evaluation"""
    signal: int
    """the signal that ended it, or 0"""


def train(config: RLConfig, *, watch: Watch | None = None) -> Result:
    """Train the configured policy into config.out; `watch` receives every event."""
    if config.ppo.threads:
        torch.set_num_threads(config.ppo.threads)
    out = Path(config.out or "out/rl")
    return run_in(out, config.resume, lambda: PolicyRun(config, out, watch))


class PolicyRun(LoggedRun):
    def __init__(self, config: RLConfig, out: Path, watch: Watch | None) -> None:
        super().__init__(out, watch, config.ppo.keep)
        self.config = config
        torch.manual_seed(config.ppo.seed)
        self.env = make_batch(config.env.id, config.env.count, config.env.length)
        self.policy = make_policy(config, self.env)
        self.named = dict(self.policy.named_parameters())
        stack = self.policy.stack()
        spans = {id(module.ratio) for module in stack.spans_modules()} if stack is not None else set()
        self.optimizer = make_optimizer(self.named.items(), config.optim, lambda name: id(self.named[name]) in spans)
        self.env.seed(config.ppo.seed)
        self.actor = Actor(self.env, self.policy)
        self.updates, self.seconds, self.saved_at = 0, 0.0, -1
        self.latest = ""

    def go(self, notes: list[str]) -> Result:
        self._begin(notes)
        while self.updates < self.config.ppo.updates and not self.signals.caught:
            self._one_update()
            every = self.config.ppo.save_every
            if every and self.updates % every == 0:
                self._save()
        return self._end()

    def _begin(self, notes: list[str]) -> None:
        found, damaged = self.newest_checkpoint(self.config.resume)
        lost = restore(self, found) if found is not None else ""
        earlier = self.open_log(found, self.config.ppo.tensorboard)
        if found is None:
            parameters = sum(p.numel() for p in self.policy.parameters())
            machine = describe_machine("cpu", 1)
            self.log_event(
                PolicyStartEvent(
                    0, self.out.name, as_dict(self.config), parameters, self.env.name, self.env.rows, machine, VERSION
                )
            )
        else:
            self.saved_at = self.updates
            self.log_event(ResumeEvent(self.updates, str(found), seconds=self.seconds))
        for text in [*notes, *damaged, *earlier, *([lost] if lost else [])]:
            self.log_event(NoteEvent(self.updates, text))

    def _one_update(self) -> None:
        c, began = self.config.ppo, time.perf_counter()
        # chance depends on seed and update only, so a checkpoint needs no random state
        chance = c.seed * 1_000_003 + self.updates
        torch.manual_seed(chance)
        self.env.seed(chance)
        self.policy.eval()
        window, episodes = self.actor.collect(c.window)
        self.policy.train()
        per_update = c.epochs * c.minibatches
        steps = iter(range(self.updates * per_update, (self.updates + 1) * per_update))

        def set_rate() -> None:
            set_lr(self.optimizer, lr_at(self.config.optim, next(steps), c.updates * per_update))

        try:
            losses = update(self.policy, self.optimizer, window, c, self.config.optim.global_clip, set_rate)
        except FloatingPointError as error:
            self.log_event(StopEvent(self.updates, str(error), self.seconds))
            raise ValueError(f"stopped at update {self.updates + 1:,}: {error}; choose a smaller optim.lr") from None
        self.updates += 1
        took = time.perf_counter() - began
        self.seconds += took
        self._log_update(losses, episodes, took)

    def _log_update(self, losses: Losses, episodes: Episodes, took: float) -> None:
        c, stack = self.config.ppo, self.policy.stack()
        policy, value, entropy, kl, _, norm = (float(t) for t in losses)
        spans = stack.spans() if stack is not None else []
        known = [z for layer in spans for z in layer if z is not None]
        event = UpdateEvent(
            self.updates, self.seconds, self.updates * c.window * self.env.rows, len(episodes.returns), policy, value,
            entropy, kl, norm, self.optimizer.param_groups[0]["lr"], c.window * self.env.rows / took,
            mean(episodes.returns), mean(episodes.successes), mean(episodes.lengths), mean(known),
            spans if known else [],
        )  # fmt: skip
        self.log_event(event)
        if self.watch is not None:
            if episodes.returns:
                right = "" if math.isnan(event.success) else f" · {100 * event.success:.0f} % right"
                self.latest = f" · return {event.episode_return:.3f}{right}"
            rate = self.updates * c.window * self.env.rows / self.seconds
            title = f"update {self.updates:,}{self.latest} · {rate:,.0f} steps/s"
            self.watch(ProgressEvent(title, self.updates, c.updates))

    def _save(self) -> None:
        self.log_event(CheckpointEvent(self.updates, str(save(self))))
        self.saved_at = self.updates

    def _end(self) -> Result:
        if self.saved_at != self.updates:
            self._save()
        number, played = self.signals.caught, None
        reason = signal.Signals(number).name if number else "all updates done"
        if not number and self.config.ppo.eval_episodes:
            played = self._play()
        self.log_event(StopEvent(self.updates, reason, self.seconds))
        return Result(self.out, reason, self.updates, played, number)

    def _play(self) -> PlayEvent:
        if self.watch is not None:
            self.watch(ProgressEvent("playing whole episodes", 0, 0))
        c = self.config
        env = make_batch(c.env.id, min(EVAL_ROWS, c.ppo.eval_episodes), c.env.length)
        found = play_episodes(env, self.policy.eval(), c.ppo.eval_episodes, seed=c.ppo.seed + 10_000)
        event = play_event(self.updates, env.name, found)
        self.log_event(event)
        return event


def play_event(step: int, env: str, found: Episodes) -> PlayEvent:
    return PlayEvent(step, env, len(found.returns), mean(found.returns), mean(found.lengths), mean(found.successes))


def mean(numbers: list[float] | list[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan
