"""`spanformer report …`: tables and pictures from result files alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from spanformer.cli.leaf import Leaf
from spanformer.report import attention as report
from spanformer.report import attention_pictures as pictures


@dataclass(frozen=True)
class AttentionReport:
    """Print the tables of an attention benchmark and draw its pictures beside the file."""

    path: tyro.conf.Positional[Path]
    """The result file, attention.json."""


def show_attention(path: Path) -> None:
    """Print the tables, draw the pictures beside the file, and say where they are."""
    results, console = report.load(path), Console()
    for table in report.tables(results):
        console.print(table)
        console.print()
    for kind, file in (("Results", path), *(("Picture", picture) for picture in pictures.draw(results, path.parent))):
        console.print(f"{kind}: {file}", soft_wrap=True, highlight=False)


ATTENTION = Leaf(AttentionReport, lambda options: show_attention(options.path))
