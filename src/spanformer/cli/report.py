"""`spanformer report …`: print tables and draw pictures from result files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape

from spanformer.cli.command import Command
from spanformer.cli.progress import Progress
from spanformer.core.files import write_text
from spanformer.core.text import printable
from spanformer.report import attention as report
from spanformer.report import attention_pictures as pictures


@dataclass(frozen=True)
class AttentionReport:
    """Print the tables of an attention benchmark and draw its pictures beside the file."""

    path: tyro.conf.Positional[Path]
    """the result file, attention.json"""


@dataclass(frozen=True)
class RunsReport:
    """Draw one run, or several runs next to each other, as one HTML page with pictures."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """folders of runs, or their events.jsonl"""
    out: str = ""
    """output folder; by default `report` in the run's folder, or out/report-A-B for several runs A and B"""


@dataclass(frozen=True)
class SeedsReport:
    """Print one table of several comparisons that differ in their seed: the mean and the range of each run.

    spanformer report seeds out/headline-1 out/headline-2
    """

    comparisons: tyro.conf.Positional[tuple[str, ...]]
    """folders of comparisons (spanformer compare), or their compare.json"""
    out: str = ""
    """file to write the table to, as Markdown"""


def show_seeds(options: SeedsReport) -> None:
    from spanformer.report.compare_rows import read_rows
    from spanformer.report.compare_table import markdown
    from spanformer.report.seeds import notes, seeds_table

    if not options.comparisons:
        raise ValueError("no comparison is given; expected the folder of at least one")
    if len({Path(path).resolve() for path in options.comparisons}) < len(options.comparisons):
        raise ValueError(f"comparisons is {list(options.comparisons)}; expected each once")
    header, rows = seeds_table({path: read_rows(Path(path)) for path in options.comparisons})
    text = "\n\n".join((markdown(header, rows), *notes(header))) + "\n"
    print(text, end="")
    if options.out:
        write_text(Path(options.out), text)


def show_runs(options: RunsReport) -> None:
    from spanformer.report.events import read_runs
    from spanformer.report.page import file_name, write_report
    from spanformer.report.spans_text import summary

    if not options.runs:
        raise ValueError("no run is given; expected the folder of at least one run")
    paths = [Path(run) for run in options.runs]
    runs = read_runs(paths)
    for each in runs:
        print(summary(each))
    if options.out:
        out = Path(options.out)
    elif len(runs) == 1:
        out = runs[0].path.parent / "report"
    else:
        out = Path("out") / f"report-{'-'.join(file_name(each.name) for each in runs)}"[:80]
    with Progress(transient=True) as progress:
        progress("drawing the report", 0, 0)
        page = write_report(paths, out)
    print(f"report: {printable(page)}")


def show_attention(path: Path) -> None:
    """Print the tables, draw the pictures beside the file, and print their paths."""
    results, console = report.load(path), Console()
    for table in report.tables(results):
        console.print(table)
        console.print()
    for kind, file in (("Results", path), *(("Picture", picture) for picture in pictures.draw(results, path.parent))):
        console.print(f"{kind}: {escape(printable(file))}", soft_wrap=True, highlight=False)


RUNS = Command(RunsReport, show_runs)
SEEDS = Command(SeedsReport, show_seeds)
ATTENTION = Command(AttentionReport, lambda options: show_attention(options.path))
