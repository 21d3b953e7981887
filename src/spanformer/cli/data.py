"""`spanformer data [SOURCE]`: prepare a corpus once, and print its sizes."""

from __future__ import annotations

from spanformer.cli.command import Command
from spanformer.cli.options import parse_options
from spanformer.cli.progress import Progress
from spanformer.core.text import printable
from spanformer.data.config import DataConfig


def parse(program: str, arguments: list[str]) -> DataConfig:
    named = arguments and not arguments[0].startswith("-")
    default = DataConfig(source=arguments[0]) if named else DataConfig()
    return parse_options(DataConfig, f"{program} [SOURCE]", arguments[1:] if named else arguments, default)


def run(config: DataConfig) -> None:
    from spanformer.core.events import UNIT_NAMES
    from spanformer.data import prepare

    with Progress() as report:
        data = prepare(config, on_progress=report)
    unit = UNIT_NAMES[data.unit]
    print(f"{printable(config.source)}: {data.vocab.size:,} different tokens, in {printable(data.folder)}")
    for name, split in data.splits.items():
        print(f"  {name:<6}{split.tokens:>14,} tokens{split.units:>14,} {unit}s")


DATA = Command(DataConfig, run, parse)
