"""What runs of `spanformer rl` share: a locked folder, signals, the log of events, the checkpoint to resume from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from spanformer.core.events import FILE, Event, Watch
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.event_log import EventLog
from spanformer.train.run_folder import BOARD, UNLOCKED, claim_folder, put_aside
from spanformer.train.signals import SignalCatcher

R = TypeVar("R", covariant=True)


class LoggedRun:
    def __init__(self, out: Path, watch: Watch | None, keep: int) -> None:
        """keep: checkpoints that stay."""
        self.out, self.watch = out, watch
        self.checkpoints = Checkpoints(out / "checkpoints", keep=keep)
        self.log: EventLog | None = None
        self.signals = SignalCatcher()

    def log_event(self, event: Event) -> None:
        if self.log is not None:
            self.log.write(event)
        if self.watch is not None:
            self.watch(event)

    def newest_checkpoint(self, resume: bool) -> tuple[Path | None, list[str]]:
        """The checkpoint to resume from, None for a new run, and a sentence for each damaged one."""
        damaged: list[str] = []
        found = self.checkpoints.newest(damaged.append) if resume else None
        if damaged and found is None:
            raise ValueError(f"no checkpoint is complete: {'; '.join(damaged)}; choose another --out")
        return found, damaged

    def open_log(self, found: Path | None, tensorboard: Literal["auto", "on", "off"]) -> list[str]:
        """Open the log of a run resumed from `found`; returns what to note about files of an earlier attempt."""
        aside = put_aside(self.out) if found is None else None
        self.log = EventLog(self.out / FILE, {"auto": "auto", "on": self.out / BOARD, "off": None}[tensorboard])
        return [f"files of the earlier attempt are in {aside}"] if aside is not None else []


class Going(Protocol, Generic[R]):
    signals: SignalCatcher
    log: EventLog | None

    def go(self, notes: list[str]) -> R: ...


def run_in(out: Path, resume: bool, make: Callable[[], Going[R]]) -> R:
    """Make a run and let it go, with its folder locked and signals caught."""
    with claim_folder(out, resume=resume) as locked:
        run = make()
        run.signals.start()
        try:
            return run.go([] if locked else [UNLOCKED])
        finally:
            run.signals.stop()
            if run.log is not None:
                run.log.close()
