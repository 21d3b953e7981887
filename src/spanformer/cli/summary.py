"""Print the results of a run: quality before and after, learned spans, cost of attention, path of the report."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from spanformer.cli.command import Incomplete
from spanformer.cli.progress import Progress
from spanformer.core.text import printable
from spanformer.report.events import read_run
from spanformer.report.page import write_report
from spanformer.report.spans_text import spans_table, summary


def show_summary(out: Path) -> None:
    """Print the summary, and write the report into the run's folder."""
    with reporting(out, shlex.join(["spanformer", "report", str(out)])):
        run = read_run(out)
        print()
        print(summary(run))
        last = run.steps[-1] if run.steps else None
        spans = [] if last is None else [[None if math.isnan(z) else z for z in layer] for layer in last.spans.tolist()]
        if last is not None and any(z is not None for layer in spans for z in layer):
            print()
            print(spans_table(spans, last.reach.tolist(), run.start.shape.max_span))
        print()
        with Progress(transient=True) as report:
            report("drawing the report", 0, 0)
            page = write_report([out], out / "report")
        print(f"report: {printable(page)}")


@contextlib.contextmanager
def reporting(out: Path, again: str) -> Iterator[None]:
    """Wrap a report after training: if it fails, the message says that the training itself is complete.

    again: the command that makes the report again.
    """
    try:
        yield
    except ImportError as error:  # matplotlib is an optional extra: a missing one is no failure
        print(f"no report was drawn: {error}; then run  {printable(again)}")
    except BrokenPipeError:  # the reader closed the pipe
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise Incomplete(
            f"training is complete and saved in {out}, but its report failed ({said}); make the report again with "
            f"{again}"
        ) from error
