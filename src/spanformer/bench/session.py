"""Shared by all benchmarks: options, timing in turn, the result file, and progress.

`spanformer bench NAME` runs bench/NAME.py: OPTIONS is the dataclass of its options, run(bench) measures and prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from spanformer.bench.results import PartsFile, describe_machine
from spanformer.bench.timing import Timing, round_robin
from spanformer.core.malloc import keep_freed_memory
from spanformer.core.progress import OnProgress, silent


@dataclass(frozen=True)
class BenchOptions:
    rounds: int = 5
    """Rounds; each times all contenders in turn, and results are medians over rounds."""
    budget: float = 60.0
    """Seconds per comparison: after this time no new round begins, once two are done. Up to a third is spent on
    waiting and repeating when other processes disturb a measurement."""
    threads: int = 2
    """CPU threads."""
    quick: bool = False
    """Run a rough benchmark with small sizes and few rounds, for testing; its results are not reliable."""
    out: Path | None = None
    """JSON result file; parts that are not measured again stay in it. Default: out/bench/NAME.json."""

    def __post_init__(self) -> None:
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.budget < 0:
            raise ValueError(f"budget is {self.budget}; expected seconds, 0 or more")

    def size(self, whole: int, quick: int) -> int:
        """A size of the benchmark: the whole one, or the quick one."""
        return quick if self.quick else whole


Options = TypeVar("Options", bound=BenchOptions)


class Bench(Generic[Options]):
    """One run of a benchmark. `say` receives every line of its results, `report` its progress."""

    def __init__(
        self,
        name: str,
        options: Options,
        report: OnProgress = silent,
        say: Callable[[str], object] = lambda _line: None,
    ) -> None:
        self.options, self.report, self.say = options, report, say
        self.file = PartsFile(options.out or Path("out") / "bench" / f"{name}.json", name)
        self.rounds = min(options.rounds, 2) if options.quick else options.rounds
        self.done, self.total = 0, 0
        self._memory_is_kept = False

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Set the threads and keep freed memory, as `spanformer train` does."""
        threads = torch.get_num_threads()
        torch.set_num_threads(self.options.threads)
        self._memory_is_kept = keep_freed_memory(True)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            keep_freed_memory(False)

    def plan(self, steps: int) -> None:
        """Announce this many more steps, for the estimate of the time left."""
        self.total += steps

    def begin(self, title: str) -> None:
        """Begin a step other than a comparison; `end` ends it."""
        self.report(title, self.done, self.total)

    def end(self) -> None:
        self.done += 1

    def compare(
        self, title: str, functions: Mapping[str, Callable[[], object]], *, shortest: float = 0.2, wait: bool = True
    ) -> dict[str, Timing]:
        """Time the functions in turn; one step of the plan. shortest: minimum seconds per sample. wait: see
        `round_robin`."""

        def on_round(waiting: str, share: float) -> None:
            self.report(f"{title}, {waiting}" if waiting else title, self.done + share, self.total)

        quick = self.options.quick
        timings = round_robin(
            functions, repeats=self.rounds, warm_up=0 if quick else 1, shortest=0.0 if quick else shortest,
            budget=min(self.options.budget, 1.0) if quick else self.options.budget, wait=wait,
            on_round=on_round,
        )  # fmt: skip
        self.end()
        return timings

    def keep(self, part: str, found: object) -> None:
        """Write to the result file at once: an interrupted run loses no measurement."""
        options = {name: recorded(value) for name, value in asdict(self.options).items()}
        self.file.keep(part, found, options, describe_machine(self.options.threads, self._memory_is_kept))


def recorded(value: Any) -> Any:
    """An option as result files hold it: of a file elsewhere only the name, which is all that it says to others."""
    if isinstance(value, tuple):
        return [recorded(each) for each in value]
    if isinstance(value, (str, Path)):
        return Path(value).name if Path(value).is_absolute() else str(value)
    return value


def check_parts(parts: tuple[str, ...], known: Mapping[str, object]) -> None:
    if unknown := [part for part in parts if part not in known]:
        raise ValueError(f"parts holds {unknown[0]!r}; expected any of {', '.join(known)}")


def check_same(name: str, mine: list[torch.Tensor], theirs: list[torch.Tensor], most: float = 1e-4) -> float:
    """The largest difference relative to the largest value; raises ValueError above `most`, so that a wrong result is
    not timed."""
    pairs = list(zip(mine, theirs, strict=True))
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    if not worst < most:
        raise ValueError(f"{name} differs from its peer by {worst:.2g} of the largest value; expected below {most:g}")
    return worst
