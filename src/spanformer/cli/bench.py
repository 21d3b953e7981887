"""`spanformer bench …`: measure, write the result file, print its tables, draw its pictures."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spanformer.bench import AttentionBench, bench_attention
from spanformer.bench.attention import RESULT_FILE
from spanformer.cli.leaf import Leaf
from spanformer.cli.report import show_attention


def run_attention(config: AttentionBench) -> None:
    """Benchmark with a progress bar, then show what came out."""
    path = config.out / RESULT_FILE
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=None)

        def on_step(title: str, done: float, total: float) -> None:
            progress.update(task, description=title, completed=done, total=total)

        try:
            bench_attention(config, on_step=on_step)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; what was measured until now is in {path}, if anything") from None
    show_attention(path)


ATTENTION = Leaf(AttentionBench, run_attention)
