"""A run: prepare the data, make or continue the model, train, evaluate, save; every event told to whoever watches."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spanformer.data import Lanes, Prepared, prepare
from spanformer.model.lm import LM, State
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig
from spanformer.train.diagnose import Diagnosis
from spanformer.train.dynamic import dynamic_event
from spanformer.train.evaluate import Score, evaluate
from spanformer.train.events import EventLog
from spanformer.train.guard import Guard, TooManySkips
from spanformer.train.measure import measure_cost
from spanformer.train.optim import clip_global, make_optimizer, set_lr
from spanformer.train.progress import Progress, schedule_factor
from spanformer.train.resume import restore, save
from spanformer.train.start import start_event
from spanformer.train.step import backward
from spanformer.train.world import World, join_world, wrap

Watch = Callable[[dict], None]
EVENTS = "events.jsonl"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Result:
    out: Path
    reason: str
    """why the run ended"""
    steps: int
    bits: float | None
    """validation bits per unit at the end"""
    signal: int
    """the signal that ended it, or 0"""


def train(config: RunConfig, *, watch: Watch | None = None) -> Result:
    """Train what the configuration describes, into config.out; `watch` is told every event (a row of events.jsonl)."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    with join_world(config.train.device, config.train.engine) as world:
        out = claim_folder(config, world)
        data = prepare_once(config, world, watch)
        with Run(config, data, world, out, watch) as run:
            return run.go()


def claim_folder(config: RunConfig, world: World) -> Path:
    """The run's folder, made anew; one that exists is taken only to continue the run in it."""
    out = Path(config.out or "out/run")
    if world.first:
        if out.exists() and not out.is_dir():
            raise ValueError(f"{out} is a file; expected a folder for the run, choose another --out")
        if out.is_dir() and any(out.iterdir()) and not config.resume:
            raise ValueError(f"{out} exists already; continue the run in it with --resume, or choose another --out")
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "checkpoints").mkdir(exist_ok=True)
        except PermissionError:
            raise ValueError(f"{out} cannot be written to; choose another --out") from None
    world.wait()
    return out


def prepare_once(config: RunConfig, world: World, watch: Watch | None) -> Prepared:
    """The data; the first process prepares it, the others then find it prepared."""

    def tell(title: str, done: float, total: float) -> None:
        if watch is not None:
            watch({"event": "prepare", "title": title, "done": done, "total": total})

    data = prepare(config.data, on_progress=tell) if world.first else None
    world.wait()
    return data or prepare(config.data)


class Run:
    def __init__(self, config: RunConfig, data: Prepared, world: World, out: Path, watch: Watch | None) -> None:
        t = config.train
        config = replace(config, model=replace(config.model, vocab=config.model.vocab or data.vocab.size))
        if config.model.vocab < data.vocab.size:
            raise ValueError(
                f"model.vocab is {config.model.vocab}; the data has {data.vocab.size} tokens, so expected at least that"
            )
        self.config, self.data, self.world, self.out, self.watch = config, data, world, out, watch
        torch.manual_seed(t.seed)
        self.model = LM(config.model).to(world.device)
        self.model.checkpointing = t.checkpointing
        if t.compile:
            for block in self.model.blocks:
                block.compile(dynamic=True)
        self.engine = wrap(self.model, world)
        spans = {id(m.ratio) for m in self.model.spans_modules()}
        self.named = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.named.items(), config.optim, lambda name: id(self.named[name]) in spans)
        train_ids = data.splits["train"].ids
        self.lanes = Lanes(train_ids, t.batch, t.block, seed=t.seed, rows=world.rows(t.batch))
        if (t.batch // world.size) % t.micro:
            raise ValueError(f"train.micro is {t.micro}; expected a divisor of a process's lanes, {t.batch // world.size}")
        self.state: State | None = None
        self.progress = Progress()
        self.guard = Guard(t.spike, t.max_skips)
        self.checkpoints = Checkpoints(out / "checkpoints", keep=t.keep)
        self.diagnosis = Diagnosis(config, self._flat_spans())
        self.signal = 0
        """the signal that ends the run, once all processes know of it"""
        self._caught = 0

    def __enter__(self) -> Run:
        t = self.config.train
        board = {"auto": "auto", "on": self.out / "tensorboard", "off": None}[t.tensorboard]
        self.log = EventLog(self.out / EVENTS, board) if self.world.first else None
        self._handlers = {s: signal.signal(s, self._catch) for s in SIGNALS}
        return self

    def __exit__(self, *_exception) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self.log is not None:
            self.log.close()

    def go(self) -> Result:
        self._begin()
        p, t = self.progress, self.config.train
        reason = "all steps done" if p.step >= t.steps else ""
        while not reason:
            reason = self._one_step()
            last = bool(reason)
            if t.eval_every and p.step % t.eval_every == 0 and not last:
                reason = self._evaluate()
                last = bool(reason)
            if not last and t.save_every and p.step % t.save_every == 0:
                self._save()
        return self._end(reason)

    def tell(self, event: str, row: dict) -> None:
        """One row, written by the first process and shown to whoever watches it."""
        row = {"step": self.progress.step} | row
        if self.log is not None:
            self.log.write(event, row)
        if self.watch is not None and self.world.first:
            self.watch({"event": event} | row)

    def _begin(self) -> None:
        found = self.world.told(str(self._newest() or "")) if self.config.resume else ""
        if not found:
            self.tell("start", start_event(self))
            self._evaluate()
        else:
            restore(self, Path(found))
            self.tell("resume", {"path": found})

    def _newest(self) -> Path | None:
        """For the first process alone to look for: it also tidies up."""
        return self.checkpoints.newest(lambda text: self.tell("note", {"text": text})) if self.world.first else None

    def _one_step(self) -> str:
        """Take or skip one step; returns why the run ends with it, or ''."""
        t, p, world = self.config.train, self.progress, self.world
        began = time.perf_counter()
        batch = next(self.lanes)
        x, y = (torch.from_numpy(a).to(world.device) for a in (batch.x, batch.y))
        # dropout is a function of seed, step and process: nothing about it needs to be saved
        torch.manual_seed((t.seed * 1_000_003 + p.step) * 4096 + world.rank)
        self.optimizer.zero_grad(set_to_none=True)
        losses, state = backward(
            self.engine, self.model, world, x, y, None if batch.reset else self.state, micro=t.micro, dtype=t.dtype
        )
        norm = clip_global(self.named.values(), self.config.optim.global_clip)
        clock = p.seconds + time.perf_counter() - began
        over = [0 < t.minutes * 60 <= clock, *(self._caught == s for s in SIGNALS)]
        numbers = torch.stack([losses.loss, losses.penalty, norm]).double()
        numbers = torch.cat([numbers, torch.tensor([clock, *over], dtype=torch.float64, device=world.device)])
        loss, penalty, grad_norm, clock, *over = world.mean(numbers).tolist()  # the one wait for the device
        self.signal = next((s for s, caught in zip(SIGNALS, over[1:], strict=True) if caught), 0)
        ends = any(over)  # for one process, and so for all
        p.step += 1
        p.tokens += t.batch * t.block
        reason = self.guard.refuses(loss, grad_norm)
        if reason is None:
            set_lr(self.optimizer, schedule_factor(self.config, p.step - 1, clock))
            self.optimizer.step()
            self.model.after_step()
            self.state = state
            p.add(loss, penalty)
        else:
            self.state = None  # it may hold what is not finite
            self.tell("skip", {"reason": reason})
        p.seconds += time.perf_counter() - began
        if reason is not None:
            try:
                self.guard.count(reason)
            except TooManySkips as error:
                good = self.checkpoints.newest(lambda text: None)
                where = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
                self.tell("stop", {"reason": str(error), "seconds": p.seconds})
                raise ValueError(f"stopped at step {p.step:,}: {error}; {where}") from None
        if p.step % t.log_every == 0 or p.step >= t.steps or ends:
            self._log_step(grad_norm)
        if ends:
            return signal.Signals(self.signal).name if self.signal else f"{t.minutes:g} minutes are over"
        return "all steps done" if p.step >= t.steps else ""

    def _log_step(self, grad_norm: float) -> None:
        p, spans = self.progress, self._flat_spans()
        row = p.row() | {
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "bits": p.mean_loss * self._tokens_per_unit("train") / math.log(2),
            "span_average": sum(spans) / len(spans) if spans else None,
            "span_longest": max(spans, default=None),
            "spans": self.model.spans(),
            "reach": self.model.lookback(),
            "memory": [h.shape[1] for h in self.state.hidden] if self.state else [],
            "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        self.tell("step", row)
        p.clear()
        for text in self.diagnosis.look(p.step, spans):
            self.tell("note", {"text": text})

    def _evaluate(self) -> str:
        """Bits per unit on the validation split; returns why the run ends with it, or ''."""
        t, p = self.config.train, self.progress
        score = self._score("valid", t.eval_tokens)
        self.tell("eval", {"seconds": p.seconds, "split": "valid", "loss": score.loss, "bits": score.bits,
                           "tokens": score.tokens})  # fmt: skip
        p.take_score(score.bits)
        if t.patience and p.stale >= t.patience:
            return f"{p.stale} evaluations brought no improvement"
        return ""

    def _score(self, split: str, most: int) -> Score:
        t, s = self.config.train, self.data.splits[split]
        ids = s.ids[:most] if most else s.ids
        lanes = max(1, min(t.batch, len(ids) // (8 * t.block)))
        units = s.units * len(ids) / s.tokens
        score = evaluate(self.model, ids, units=units, lanes=lanes, block=t.block, dtype=t.dtype)
        nats = torch.tensor(score.nats, dtype=torch.float64, device=self.world.device)
        return score._replace(nats=float(self.world.mean(nats)))  # the same in all processes, which decide by it

    def _save(self) -> None:
        path = save(self)
        self.tell("checkpoint", {"path": str(path)})
        self.world.wait()

    def _end(self, reason: str) -> Result:
        p = self.progress
        if not self.signal and p.scored_at != p.step:
            self._evaluate()
        self._save()
        if self.config.train.measure and not self.signal and self.world.device.type == "cpu" and self.world.size == 1:
            batch = next(self.lanes)
            self.tell("cost", measure_cost(self.model, torch.from_numpy(batch.x), torch.from_numpy(batch.y)))
        if not self.signal and self.world.size == 1:
            found = dynamic_event(self.model, self.data.splits["valid"].ids[: 4 * self.config.train.block], self.data.vocab)
            if found is not None:
                self.tell("dynamic", found)
        self.tell("stop", {"reason": reason, "seconds": p.seconds})
        return Result(self.out, reason, p.step, p.latest, self.signal)

    def _tokens_per_unit(self, split: str) -> float:
        s = self.data.splits[split]
        return s.tokens / s.units

    def _flat_spans(self) -> list[float]:
        return [z for layer in self.model.spans() for z in layer if z is not None]

    def _catch(self, number: int, _frame: object) -> None:
        """The step under way ends first; a second signal of the kind ends the process at once."""
        self._caught = number
        signal.signal(number, self._handlers[number])
