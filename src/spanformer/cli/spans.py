"""`spanformer spans CHECKPOINT`: print the learned span of every head in tokens, as a table and bars."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from spanformer.cli.command import Command


@dataclass(frozen=True)
class SpansOptions:
    checkpoint: tyro.conf.Positional[str]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model"""
    ascii: bool = False
    """draw the bars with ASCII characters"""


def run(options: SpansOptions) -> None:
    from spanformer.model.load import load_any
    from spanformer.report.spans_text import spans_table

    model = load_any(options.checkpoint)
    if model.dynamic_parts() and not any(z is not None for layer in model.spans() for z in layer):
        print("spans are dynamic (chosen per token), so the table shows each head's limit; see the run's report")
    print(spans_table(model.spans(), model.distances(), model.config.max_span, ascii_only=options.ascii))


SPANS = Command(SpansOptions, run)
