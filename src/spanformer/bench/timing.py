"""Medians of callables timed in turn, on a machine that others may be using.

Contenders are timed round-robin, so that a slow minute affects all of them. A matrix product (sgemm) runs in the same
rounds and measures the speed of the machine at that moment. A sample during which other processes took CPU time is
measured again while the budget allows; after that the least disturbed one is kept and counted as disturbed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

SGEMM = "sgemm"
SGEMM_SIDE = 1024


OnRound = Callable[[str, float], None]
"""takes the reason for waiting ("" while measuring), and the completed share of the rounds"""
WAITING = "waiting for a quiet machine"
WAITING_SHARE = 1 / 3
"""share of a comparison's budget for waiting for other processes and repeating samples"""


@dataclass
class Patience:
    """How long one comparison may still wait for a quiet machine."""

    seconds: float
    on_wait: Callable[[str], None] = lambda _what: None
    """called with the reason for waiting, and with "" at the end of it"""

    def wait(self, seconds: float) -> bool:
        """Sleep if patience is left; returns whether it was."""
        if self.seconds < seconds:
            return False
        self.seconds -= seconds
        self.on_wait(WAITING)
        time.sleep(seconds)
        self.on_wait("")
        return True


@dataclass
class Timing:
    """Seconds per call of each round."""

    samples: list[float] = field(default_factory=list)
    disturbed: int = 0
    """how many kept samples other processes disturbed"""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def times_as_fast_as(self, other: Timing) -> float:
        """Median of the ratios per round: changes of the machine's speed affect both sides of a ratio."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.samples, other.samples, strict=True))


def round_robin(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    shortest: float = 0.06,
    budget: float = 60.0,
    wait: bool = True,
    on_round: OnRound = lambda _waiting, _share: None,
) -> dict[str, Timing]:
    """Time each function `repeats` times, in turn.

    shortest: a sample repeats its function until it lasted this many seconds. budget: after this many seconds no new
    round begins, once two are done; a third of them may go into waiting for other processes and
    measuring again. wait: False never measures again, for functions that change state.
    """
    done = 0
    patience = Patience(WAITING_SHARE * budget if wait else 0.0, lambda what: on_round(what, done / repeats))
    on_round("", 0.0)
    for function in functions.values():
        for _ in range(warm_up):
            function()
    timings = {name: Timing() for name in functions}
    start = time.perf_counter()
    for done in range(repeats):
        if done >= 2 and time.perf_counter() - start > budget:
            break
        for name, function in functions.items():
            seconds, quiet = sample(function, shortest, patience)
            timings[name].samples.append(seconds)
            timings[name].disturbed += not quiet
        on_round("", (done + 1) / repeats)
    return timings


def sample(
    function: Callable[[], object], shortest: float, patience: Patience, others: float = 0.12
) -> tuple[float, bool]:
    """Seconds per call, and whether the machine was quiet: other processes used less than `others` of one core."""
    best: tuple[float, float] | None = None
    pause = 0.25
    while True:
        before, calls, start = _others_seconds(), 0, time.perf_counter()
        while True:
            function()
            calls += 1
            elapsed = time.perf_counter() - start
            if elapsed >= shortest:
                break
        share = (_others_seconds() - before) / elapsed
        if share < others + 0.03 / elapsed:  # the kernel counts busy time in ticks of 10 ms, on every core
            return elapsed / calls, True
        best = min(best or (share, elapsed / calls), (share, elapsed / calls))
        if not patience.wait(pause) or patience.seconds < elapsed:
            return best[1], False
        patience.seconds -= elapsed  # repeating a sample also uses up patience
        pause = min(pause * 2, 4.0)


def sgemm(side: int = SGEMM_SIDE) -> Callable[[], object]:
    """A float32 matrix product of this machine's library: the reference rate."""
    a, b, c = torch.randn(side, side), torch.randn(side, side), torch.empty(side, side)
    torch.mm(a, b, out=c)  # warm up
    return lambda: torch.mm(a, b, out=c)


def sgemm_rate(seconds: float, side: int = SGEMM_SIDE) -> float:
    """Operations per second."""
    return 2 * side**3 / seconds


def _others_seconds() -> float:
    """CPU seconds used by all other processes; 0 if the system does not report them."""
    try:
        with open("/proc/stat") as stat:
            ticks = [int(field) for field in stat.readline().split()[1:9]]  # guest time is part of user time
    except OSError:
        return 0.0
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk
    return busy - time.process_time()
