"""What a run came to, printed: quality before and after, learned spans, what attention cost, where the report is."""

from __future__ import annotations

import math
from pathlib import Path

from spanformer.report.events import read_run
from spanformer.report.page import write_report
from spanformer.report.spans_text import spans_table, summary


def show_outcome(out: Path) -> None:
    """Print it, and write the report of the run in its own folder."""
    run = read_run(out)
    print()
    print(summary(run))
    last = run.steps[-1] if run.steps else None
    spans = [] if last is None else [[None if math.isnan(z) else z for z in layer] for layer in last.spans.tolist()]
    if last is not None and any(z is not None for layer in spans for z in layer):
        print()
        print(spans_table(spans, last.reach.tolist(), run.start.shape.max_span))
    print()
    try:
        print(f"report: {write_report([out], out / 'report')}")
    except ImportError as error:
        print(f"no report was drawn: {error}; then  spanformer report {out}")
