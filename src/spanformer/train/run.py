"""A run: prepare the data, make or continue the model, train, evaluate, save; every event told to whoever watches."""

from __future__ import annotations

import contextlib
import functools
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spanformer.core.malloc import keep_freed_memory
from spanformer.core.progress import OnProgress, silent
from spanformer.data import Prepared, prepare
from spanformer.model.config import SPECIAL
from spanformer.model.lm import LM, State
from spanformer.model.load import MODELS
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig
from spanformer.train.diagnose import Diagnosis
from spanformer.train.dynamic import dynamic_event
from spanformer.train.events import EventLog
from spanformer.train.guard import Guard, TooManySkips
from spanformer.train.measure import cost_event
from spanformer.train.objective import NextToken, make_objective
from spanformer.train.optim import clip_global, model_optimizer, set_lr
from spanformer.train.place import BOARD, EVENTS, UNLOCKED, claim_folder, put_aside
from spanformer.train.progress import Progress, schedule_factor
from spanformer.train.resume import restore, save
from spanformer.train.room import check_room
from spanformer.train.start import start_event
from spanformer.train.step import backward
from spanformer.train.world import World, join_world, wrap

Watch = Callable[[dict], None]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""after which a run saves and leaves"""


@dataclass(frozen=True)
class Result:
    out: Path
    reason: str
    """why the run ended"""
    steps: int
    bits: float | None
    """validation bits per unit, as last evaluated"""
    signal: int
    """the signal that ended it, or 0"""


def train(config: RunConfig, *, watch: Watch | None = None) -> Result:
    """Train what the configuration describes, into config.out; `watch` is told every event (a row of events.jsonl), and
    how far the work is (rows of the events "progress" and "steps", which no file holds)."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    out = Path(config.out or "out/run")
    with join_world(config.train.device, config.train.engine) as world, contextlib.ExitStack() as held:
        locked = held.enter_context(claim_folder(out, resume=config.resume)) if world.first else True
        world.wait()
        data = prepare_once(config, world, watch)
        if config.train.keep_memory and not config.train.checkpointing and world.device.type == "cpu":
            keep_freed_memory(True)
        with Run(config, data, world, out, watch) as run:
            return run.go([] if locked else [UNLOCKED])


def prepare_once(config: RunConfig, world: World, watch: Watch | None) -> Prepared:
    """The data; the first process prepares it, the others then find it prepared."""
    data = prepare(config.data, on_progress=reporter(watch)) if world.first else None
    world.wait()
    return data or prepare(config.data)


def reporter(watch: Watch | None) -> OnProgress:
    """What tells a watcher how far a piece of work is."""
    if watch is None:
        return silent
    return lambda title, done, total: watch({"event": "progress", "title": title, "done": done, "total": total})


class Run:
    def __init__(self, config: RunConfig, data: Prepared, world: World, out: Path, watch: Watch | None) -> None:
        t = config.train
        needed = data.vocab.size + SPECIAL[config.model.kind]
        config = replace(config, model=replace(config.model, vocab=config.model.vocab or needed))
        if config.model.vocab < needed:
            own = needed - data.vocab.size
            beside = f" and the model {own} of its own" if own else ""
            raise ValueError(
                f"model.vocab is {config.model.vocab}; the data has {data.vocab.size} tokens{beside}, so expected at "
                "least that"
            )
        self.config, self.data, self.world, self.out = config, data, world, out
        self.watch = watch if world.first else None
        self.report = reporter(self.watch)
        check_room(config, world)
        torch.manual_seed(t.seed)
        self.model = MODELS[config.model.kind](config.model).to(world.device)
        self.model.checkpointing = t.checkpointing
        if t.compile:
            self.model.compile_feedforwards()
        self.engine = wrap(self.model, world)
        self.named = dict(self.model.named_parameters())
        self.optimizer = model_optimizer(self.model, config.optim)
        self.objective = make_objective(data, config, world.rows(t.batch))
        if (t.batch // world.size) % t.micro:
            raise ValueError(
                f"train.micro is {t.micro}; expected a divisor of a process's lanes, {t.batch // world.size}"
            )
        self.state: State | None = None
        self.progress = Progress()
        self.guard = Guard(t.spike, t.max_skips)
        self.checkpoints = Checkpoints(out / "checkpoints", keep=t.keep)
        self.diagnosis = Diagnosis(config, self._flat_spans())
        self.unsaved = True
        """something happened that no checkpoint holds"""
        self.signal = 0

    def __enter__(self) -> Run:
        t = self.config.train
        self._damaged: list[str] = []
        looks = self.config.resume and self.world.first  # one process alone, since it also tidies up
        found = self.checkpoints.newest(self._damaged.append) if looks else None
        if self._damaged and found is None:
            raise ValueError(f"no checkpoint can be continued from: {'; '.join(self._damaged)}; choose another --out")
        told = self.world.told(str(found or ""))
        self._found = Path(told) if told else None
        board = {"auto": "auto", "on": self.out / BOARD, "off": None}[t.tensorboard]
        self._aside, self.log = None, None
        if self.world.first:
            self._aside = put_aside(self.out) if self._found is None else None
            self.log = EventLog(self.out / EVENTS, board)
        self._handlers = {}
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread listen
            self._handlers = {s: signal.signal(s, self._catch) for s in SIGNALS}
        return self

    def __exit__(self, *_exception) -> None:
        del self.engine  # while its process group is there: see join_world
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.log is not None:
            self.log.close()

    def go(self, notes: Sequence[str] = ()) -> Result:
        """notes: told after the run has started or continued."""
        reason = self._begin()
        for text in notes:
            self.tell("note", {"text": text})
        while not reason:
            reason = self._one_step() or self._between_steps()
        return self._end(reason)

    def tell(self, event: str, row: dict) -> None:
        """One row, written by the first process and shown to whoever watches it."""
        row = {"step": self.progress.step} | row
        if self.log is not None:
            self.log.write(event, row)
        if self.watch is not None:
            self.watch({"event": event} | row)

    def tell_steps(self) -> None:
        """Only to whoever watches: how many steps are done."""
        if self.watch is not None:
            self.watch({"event": "steps", "step": self.progress.step, "seconds": self.progress.seconds})

    def _begin(self) -> str:
        """Start or continue; returns why there is nothing to do, or ''."""
        if self._found is None:
            self.tell("start", start_event(self))
            if self._aside is not None:
                self.tell("note", {"text": f"no checkpoint to continue from: the run begins anew, what an earlier "
                                           f"one wrote is in {self._aside}"})  # fmt: skip
            self._evaluate()
            return ""
        restore(self, self._found)
        row = {"path": str(self._found), "unit": self.data.unit, "seconds": self.progress.seconds}
        self.tell("resume", row)
        self.tell_steps()
        for text in self._damaged:
            self.tell("note", {"text": text})
        self.unsaved = False
        return self._over(self.progress.seconds) or self._between_steps()

    def _one_step(self) -> str:
        """Take or skip one step; returns why the run ends with it, or ''."""
        t, p, world = self.config.train, self.progress, self.world
        began = time.perf_counter()
        drawn = self.objective.draw()
        # dropout is a function of seed, step and process: nothing about it needs to be saved
        torch.manual_seed((t.seed * 1_000_003 + p.step) * 4096 + world.rank)
        self.optimizer.zero_grad(set_to_none=True)
        before = None if drawn.reset else self.state
        losses, state = backward(self.engine, self.model, world, drawn, before, micro=t.micro, dtype=t.dtype)
        norm = clip_global(self.named.values(), self.config.optim.global_clip)
        clock = p.seconds + time.perf_counter() - began
        numbers = torch.stack([losses.loss, losses.penalty, norm]).double()
        numbers = torch.cat([numbers, torch.tensor([clock, self.signal], dtype=torch.float64, device=world.device)])
        loss, penalty, grad_norm, clock, signalled = world.mean(numbers).tolist()  # the one wait for the device
        p.step += 1
        p.tokens += drawn.tokens
        self.unsaved = True
        refused = self.guard.refuses(loss, grad_norm)
        if refused is None:
            set_lr(self.optimizer, schedule_factor(self.config, p.step - 1, clock))
            self.optimizer.step()
            self.model.after_step()
            self.state = state
            p.add(loss, penalty)
        else:
            self.state = None  # it may hold what is not finite
        p.seconds += time.perf_counter() - began
        if refused is not None:
            self._skip(refused)
        reason = self._over(clock)
        if p.step % t.log_every == 0 or reason:
            self._log_step(grad_norm)
        self.tell_steps()
        # a signal interrupts and leaves the window of averages open: it goes on when the run does
        return reason or (signal.Signals(self.signal or signal.SIGTERM).name if signalled else "")

    def _over(self, seconds: float) -> str:
        """Why the run has come to its end, or ''."""
        t = self.config.train
        if self.progress.step >= t.steps:
            return "all steps done"
        return f"{t.minutes:g} minutes are over" if 0 < t.minutes * 60 <= seconds else ""

    def _skip(self, refused: str) -> None:
        p = self.progress
        self.tell("skip", {"reason": refused})
        try:
            self.guard.count(refused)
        except TooManySkips as error:
            good = self.checkpoints.newest(lambda text: None)
            where = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
            self.tell("stop", {"reason": str(error), "seconds": p.seconds})
            raise ValueError(f"stopped at step {p.step:,}: {error}; {where}") from None

    def _between_steps(self) -> str:
        """Evaluate and save where that is due; returns why the run ends here, or ''."""
        t, p = self.config.train, self.progress
        if t.eval_every and p.step % t.eval_every == 0 and p.scored_at != p.step:
            self._evaluate()
        if t.patience and p.stale >= t.patience:  # also of a run that is continued after it came to this end
            return f"{p.stale} evaluation{'s' if p.stale > 1 else ''} brought no improvement"
        if t.save_every and p.step % t.save_every == 0 and self.unsaved:
            self._save()
        return ""

    def _log_step(self, grad_norm: float) -> None:
        p, spans = self.progress, self._flat_spans()
        split = self.data.splits["train"]
        tokens_per_unit = split.tokens / split.units if self.config.model.kind == "lm" else 1.0  # others ask for tokens
        row = p.row() | {
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "bits": p.mean_loss * tokens_per_unit / math.log(2),
            "span_average": sum(spans) / len(spans) if spans else None,
            "span_longest": max(spans, default=None),
            "spans": self.model.spans(),
            "reach": self.model.distances(),
            "memory": [h.shape[1] for h in self.state.hidden] if self.state else [],
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        self.tell("step", row)
        p.clear()
        for text in self.diagnosis.look(p.step, spans):
            self.tell("note", {"text": text})

    def _evaluate(self) -> None:
        """Bits per unit on the validation split, and what is exactly right."""
        self.report("evaluating", 0, 0)
        p, score = self.progress, self.objective.evaluate(self.model, functools.partial(self.report, "evaluating"))
        nats = torch.tensor(score.nats, dtype=torch.float64, device=self.world.device)
        score = score._replace(nats=float(self.world.mean(nats)))  # the same in all processes, which decide by it
        exact = {} if score.exact is None else {"exact": score.exact}
        self.tell("eval", {"seconds": p.seconds, "split": "valid", "loss": score.loss, "bits": score.bits,
                           "tokens": score.tokens} | exact)  # fmt: skip
        p.take_score(score.bits)
        self.unsaved = True
        self.tell_steps()

    def _save(self) -> None:
        self.report("writing a checkpoint", 0, 0)
        path = save(self)
        self.tell("checkpoint", {"path": str(path)})
        self.unsaved = False
        self.world.wait()
        self.tell_steps()

    def _end(self, reason: str) -> Result:
        p = self.progress
        number = next((int(s) for s in SIGNALS if s.name == reason), 0)
        if not number and p.scored_at != p.step:
            self._evaluate()
        if self.unsaved:
            self._save()
        if not number and self.world.size == 1:
            self._look()
        self.tell("stop", {"reason": reason, "seconds": p.seconds})
        return Result(self.out, reason, p.step, p.latest, number)

    def _look(self) -> None:
        """What a step costs, and how a language model's dynamic spans move."""
        t, objective = self.config.train, self.objective
        if t.measure and self.world.device.type == "cpu":
            self.report("measuring what a step costs", 0, 0)
            event, row = cost_event(self.model, objective.draw(), self.config, self.progress.step)
            self.tell(event, row)
        if not isinstance(self.model, LM) or not isinstance(objective, NextToken):
            return
        found = dynamic_event(self.model, objective.valid_ids[: 4 * t.block], self.data.vocab)
        if found is not None:
            self.tell("dynamic", found)

    def _flat_spans(self) -> list[float]:
        return [z for layer in self.model.spans() for z in layer if z is not None]

    def _catch(self, number: int, _frame: object) -> None:
        """The step under way ends first; a second signal of the kind ends the process at once."""
        self.signal = number
        signal.signal(number, self._handlers[signal.Signals(number)])
