"""`spanformer spans CHECKPOINT …`: print the learned spans of a model, or of several and how far apart they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from spanformer.cli.command import Command
from spanformer.core.text import printable


@dataclass(frozen=True)
class SpansOptions:
    """Print the learned span of every head in tokens, as a table and bars. Of several models, print their mean, median
    and longest spans and the distance between every two, in octaves (1: spans differ by a factor of 2), and draw the
    distributions.

        spanformer spans out/demo
        spanformer spans out/code out/prose --out out/spans.png
    """

    checkpoints: tyro.conf.Positional[tuple[str, ...]]
    """a run's folder (its best checkpoint), a checkpoint, or an imported model; one, or several of the same form"""
    ascii: bool = False
    """draw the bars with ASCII characters"""
    out: Path = Path("out/spans.png")
    """picture of the distributions of several models"""


def run(options: SpansOptions) -> None:
    from spanformer.model.load import load_any
    from spanformer.report.spans_text import spans_table

    if not options.checkpoints:
        raise ValueError("no model is given; expected a run's folder, a checkpoint or an imported model")
    models = [load_any(path) for path in options.checkpoints]
    if len(models) > 1:
        compare(options, models)
        return
    model = models[0]
    if model.dynamic_parts() and not any(z is not None for layer in model.spans() for z in layer):
        print("spans are dynamic (chosen per token), so the table shows each head's limit; see the run's report")
    print(spans_table(model.spans(), model.distances(), model.config.max_span, ascii_only=options.ascii))


def compare(options: SpansOptions, models: list) -> None:
    from spanformer.report.span_distance import distribution_table, draw_distributions

    names = [printable(Path(path).name) for path in options.checkpoints]
    names = [name if names.count(name) == 1 else printable(path)
             for name, path in zip(names, options.checkpoints, strict=True)]  # fmt: skip
    for name, model in zip(names, models, strict=True):
        if not any(z is not None for layer in model.spans() for z in layer):
            raise ValueError(f"{name} has no spans that are the same for all texts; expected adaptive_span heads")
    found = {name: model.spans() for name, model in zip(names, models, strict=True)}
    if len(found) < len(models):
        raise ValueError("a model is named twice; expected each once")
    print(distribution_table(found))
    print("\ndistances are in octaves: 1 means that spans of the same rank in a layer differ by a factor of 2")
    limit = max(model.config.max_span for model in models)
    print(f"picture: {printable(draw_distributions(found, limit, options.out))}")


SPANS = Command(SpansOptions, run)
