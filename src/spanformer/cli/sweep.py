"""`spanformer sweep RUN.toml --limits 64 256 1024`: train with several span limits and report quality, average span and
cost against the limit, as in Figure 3 of the adaptive-span paper."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path

from spanformer.cli.command import Command
from spanformer.cli.compare import parameters
from spanformer.cli.progress import Progress
from spanformer.cli.runfile import read_run
from spanformer.cli.train_many import hold_out, train_many
from spanformer.core.text import printable
from spanformer.train.config import RunConfig


@dataclass(frozen=True)
class SweepConfig(RunConfig):
    limits: tuple[int, ...] = (64, 256, 1024)
    """span limits to train with, in tokens"""
    kinds: tuple[str, ...] = ("adaptive_span", "full")
    """kinds of attention to train at each limit"""


def parse(program: str, arguments: list[str]) -> SweepConfig:
    config = read_run(SweepConfig, program, arguments, sorted(str(path) for path in Path("runs").glob("*.toml")))
    if not config.limits or not config.kinds:
        raise ValueError("limits or kinds is empty; expected at least one of each")
    named = arguments and not arguments[0].startswith("-")
    out = config.out or str(Path("out") / f"sweep-{Path(arguments[0]).stem if named else 'run'}")
    return dataclasses.replace(config, out=out)


def run(config: SweepConfig) -> None:
    from spanformer.cli.summary import reporting
    from spanformer.report.page import write_report

    runs, out = [one_run(config, kind, limit) for limit in config.limits for kind in config.kinds], Path(config.out)
    again = shlex.join(["spanformer", "report", *(each.out for each in runs), "--out", str(out / "report")])
    for each in runs:
        parameters(each)  # a limit that a kind of attention does not take is refused before any training
    train_many(runs, out)
    with reporting(out, again):
        with hold_out(out), Progress(transient=True) as report:
            report("drawing the report", 0, 0)
            page = write_report([Path(each.out) for each in runs], out / "report")
        print(f"report: {printable(page)}")


def one_run(config: SweepConfig, kind: str, limit: int) -> RunConfig:
    attention = dataclasses.replace(config.model.attention, kind=kind, max_span=limit, stack=())
    if kind == "window":  # its limit is the window itself
        attention = dataclasses.replace(attention, window=limit)
    return RunConfig(
        out=str(Path(config.out) / f"{kind}-{limit}"),
        resume=config.resume,
        data=config.data,
        model=dataclasses.replace(config.model, attention=attention),
        optim=config.optim,
        train=config.train,
    )


SWEEP = Command(SweepConfig, run, parse)
