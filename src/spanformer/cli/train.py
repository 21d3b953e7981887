"""`spanformer train [RUN.toml] --section.option value …`: train with a progress bar, then print the results."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from spanformer.cli.command import Command
from spanformer.cli.runfile import read_run
from spanformer.cli.screen import Screen
from spanformer.train.config import RunConfig


def parse(program: str, arguments: list[str]) -> RunConfig:
    config = read_run(RunConfig, program, arguments, sorted(str(path) for path in Path("runs").glob("*.toml")))
    named = arguments and not arguments[0].startswith("-")
    return config if config.out else dataclasses.replace(
        config, out=str(Path("out") / (Path(arguments[0]).stem if named else "run"))
    )  # fmt: skip


def run(config: RunConfig) -> None:
    from spanformer.cli.next_commands import next_commands
    from spanformer.cli.summary import show_summary
    from spanformer.train.run import train

    with Screen(config) as screen:
        result = train(config, watch=screen.show)
    if result.signal:
        if screen.first:
            print(f"stopped by {result.reason} at step {result.steps:,}; continue with the same command and --resume")
        sys.exit(128 + result.signal)
    if screen.first:
        show_summary(result.out)
        print(next_commands(result.out, config, sys.argv[0]))


TRAIN = Command(RunConfig, run, parse)
