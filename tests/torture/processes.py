"""Commands in processes of their own, forked from one that has everything loaded: a start costs milliseconds."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from torture import jobs
from torture.phases import Page, watch_phases

LONGEST = 90.0  # seconds of one command
F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)  # of Linux
MEMORY = 3 << 29  # bytes that a command may take beyond what is loaded

_CONTEXT = multiprocessing.get_context("forkserver")


def preload(hf: bool) -> None:
    modules = ["torch._dynamo", "tyro", "spanformer.cli.train", "spanformer.cli.report", "spanformer.cli.data",
               "spanformer.cli.summary", "spanformer.train.run", "spanformer.model.load", "spanformer.infer",
               "matplotlib.backends.backend_agg", "torture.jobs"]  # fmt: skip
    _CONTEXT.set_forkserver_preload(modules + ["transformers", "spanformer.cli.fit_spans", "spanformer.hf.plan"] * hf)


@dataclass(frozen=True)
class Ended:
    code: int
    """exit code; negative: the signal"""
    said: str
    """what it printed"""
    phase: str
    """what it was doing when it ended"""

    @property
    def refused(self) -> bool:
        """Ended as promised: exit code 2 and one sentence, no traceback."""
        last = self.said.strip().splitlines()[-1:] or [""]
        return self.code == 2 and "Traceback" not in self.said and last[0].startswith("spanformer: ")


class Child:
    """One command under way. `arguments` are those of the command line, or a job of jobs.py and its own.

    file_bytes: no file may grow longer, as if the disk were full; 0: no limit. answer: what standard input holds.
    """

    def __init__(self, arguments: list[str], place: Path, *, file_bytes: int = 0, answer: str = "") -> None:
        place.mkdir(parents=True, exist_ok=True)
        self.page = Page(place / "phase", new=True)
        self._said, self._pipe = b"", _make_pipe(place / "screen")
        self.process: ForkServerProcess = _CONTEXT.Process(target=_run, args=(arguments, place, file_bytes, answer))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait(self, seconds: float = LONGEST) -> Ended:
        self.process.join(seconds)
        if self.process.is_alive():
            self.kill()
            return Ended(-signal.SIGALRM, f"still running after {seconds:.0f} s\n" + self.said(), self.page.now())
        return Ended(self.process.exitcode or 0, self.said(), self.page.now())

    def kill(self) -> Ended:
        """SIGKILL, now."""
        self.process.kill()
        self.process.join()
        return Ended(self.process.exitcode or 0, self.said(), self.page.now())

    def reach(self, phase: str, times: int, after: float) -> bool:
        """Wait until the command enters the phase so often, and `after` seconds more; False if it ended before."""
        deadline = time.monotonic() + LONGEST
        while self.page.entered(phase) < times:
            if not self.process.is_alive() or time.monotonic() > deadline:
                return False
            time.sleep(0.0003)
        time.sleep(after)
        return self.process.is_alive()

    def said(self) -> str:
        """What it has printed so far."""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self._pipe, 1 << 16):
                self._said += more
        return self._said.decode(errors="replace")


def _make_pipe(path: Path) -> int:
    """For what a command prints: a pipe and no file, since the length of files may be limited."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, F_SETPIPE_SZ, 1 << 20)  # so that nobody needs to read it meanwhile
    return reader


def run(arguments: list[str], place: Path, file_bytes: int = 0) -> Ended:
    return Child(arguments, place, file_bytes=file_bytes).wait()


def _run(arguments: list[str], place: Path, file_bytes: int, answer: str) -> None:
    from spanformer.cli.main import main

    screen = os.open(place / "screen", os.O_WRONLY)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.close(screen)
    (place / "answer").write_text(answer)
    with (place / "answer").open() as file:
        os.dup2(file.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (multiprocessing closed the one that was there)
    modules = ("spanformer.",) if "transformers" in sys.modules else ("spanformer.data", "spanformer.train",
               "spanformer.report", "spanformer.memory")  # fmt: skip
    watch_phases(place / "phase", modules)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    if file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    job = jobs.JOBS.get(arguments[0])
    if job is None:
        main(arguments)
    else:
        jobs.run(job, arguments[1:])
    sys.exit(0)
