"""What a run came to, printed: quality before and after, learned spans, what attention cost, where the report is."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from spanformer.cli.leaf import Incomplete
from spanformer.cli.progress import Progress
from spanformer.core.text import printable
from spanformer.report.events import read_run
from spanformer.report.page import write_report
from spanformer.report.spans_text import spans_table, summary


def show_outcome(out: Path) -> None:
    """Print it, and write the report of the run in its own folder."""
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
    """Around a report after training: should it fail, whatever the reason, nobody takes the training for lost.

    again: what makes the report once more.
    """
    try:
        yield
    except ImportError as error:  # matplotlib is an extra: to do without is no failure
        print(f"no report was drawn: {error}; then  {printable(again)}")
    except BrokenPipeError:  # nobody reads the output
        raise
    except Exception as error:
        said = str(error) or type(error).__name__
        raise Incomplete(
            f"training ended well and all of it is in {out}, but the report of it failed ({said}); make it again with "
            f"{again}"
        ) from error
