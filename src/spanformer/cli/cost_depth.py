"""`spanformer cost --model runs/exits.toml`: the cost of decoding a token, by the number of layers that it takes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from spanformer.cost.depth import Check, token_cost
from spanformer.report.measures import amount, percent

if TYPE_CHECKING:
    from spanformer.model.stack import TransformerStack


def model_costs(path: str, length: int, check: Check) -> dict:
    """The cost of a token after `length` others, for each number of layers: of a run file's model before training, or
    of a trained one."""
    from spanformer.depth import Exits
    from spanformer.train.run_events import model_shape

    model = _model(path)
    shape, reach = model_shape(model, block=1, batch=1), model.distances()
    maps = isinstance(model.depth, Exits) and model.depth.maps is not None
    costs = [token_cost(shape, reach, length, depth, check, maps) for depth in range(1, shape.layers + 1)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "blocks": len(model.blocks),
        "layers": shape.layers,
        "costs": [{"depth": n, **asdict(cost), "total": cost.total} for n, cost in enumerate(costs, 1)],
    }


def _model(path: str) -> TransformerStack:
    from spanformer.cli.runfile import read_run
    from spanformer.model.load import MODELS, load
    from spanformer.train.config import RunConfig

    if Path(path).suffix != ".toml":
        model = load(path)
    else:
        config = read_run(RunConfig, "spanformer cost --model", [path]).model
        model = MODELS[config.kind](replace(config, vocab=config.vocab or 256))
    if model.config.kind != "lm":
        raise ValueError(f"model.kind of {path} is {model.config.kind!r}; expected 'lm', which decodes token by token")
    return model


def show_model(console: Console, path: str, length: int, found: dict) -> None:
    title = f"Decoding a token of {path} after {length:,} others"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("layers", "FLOPs", "of all layers", "their layers", "keys, values of others", "checks", "output"):
        table.add_column(name, justify="right", no_wrap=True)
    whole = found["costs"][-1]["total"]
    for row in found["costs"]:
        parts = [amount(row[name]) for name in ("layers", "skipped", "checks", "output")]
        table.add_row(str(row["depth"]), amount(row["total"]), percent(row["total"] / whole), *parts)
    console.print(table)
    blocks, layers = found["blocks"], found["layers"]
    shared = f", one block's for all {layers} layers" if blocks < layers else ""
    console.print(f"{amount(found['parameters'])} parameters{shared}.", style="dim")
