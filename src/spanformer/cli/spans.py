"""`spanformer spans CHECKPOINT`: what every head has learned, in tokens, as a table and a picture of bars."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from spanformer.cli.leaf import Leaf


@dataclass(frozen=True)
class SpansOptions:
    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    ascii: bool = False
    """bars of plain characters"""


def run(options: SpansOptions) -> None:
    from spanformer.model.load import load_any
    from spanformer.report.spans_text import spans_table

    model = load_any(options.checkpoint)
    if model.dynamic_parts() and not any(z is not None for layer in model.spans() for z in layer):
        print("each token chooses its spans, so only the most that a head may see stands here; a run's report has more")
    print(spans_table(model.spans(), model.distances(), model.config.max_span, ascii_only=options.ascii))


SPANS = Leaf(SpansOptions, run)
