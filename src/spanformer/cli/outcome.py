"""What a run came to, printed: quality before and after, the learned spans, what attention cost, where the report is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spanformer.report.events import read_run
from spanformer.report.page import write_report
from spanformer.report.spans_text import spans_table, summary


def show_outcome(out: Path) -> None:
    """Print it, and write the report of the run in its own folder."""
    run = read_run(out)
    print()
    print(summary(run))
    last = run.steps[-1] if run.steps else None
    if last is not None and np.isfinite(last.spans).any():
        print()
        print(spans_table(last.spans, last.reach, run.start.shape.max_span))
    print()
    try:
        print(f"report: {write_report([out], out / 'report')}")
    except ImportError as error:
        print(f"no report was drawn: {error}; then  spanformer report {out}")
