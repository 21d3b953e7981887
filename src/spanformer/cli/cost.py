"""`spanformer cost --length 8192 --heads 12 --dim 768`: compute the cost of attention for each mechanism."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from spanformer.cli.command import Command
from spanformer.core.files import write_text
from spanformer.cost.mechanisms import AttentionCost
from spanformer.cost.published import Figure, flops_figures, memory_figures
from spanformer.cost.sizes import Sizes
from spanformer.kinds.costs import COSTED, layer_cost, price, split_heads
from spanformer.kinds.registry import KINDS
from spanformer.report.measures import NOTHING, amount, decimal, percent

ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
WIDE = 140
"""terminal columns from which the table has a column for what a query sees"""
KIND_WIDTH = 60
"""terminal columns; longer kinds take two lines"""


@dataclass(frozen=True)
class CostOptions:
    """Compute the cost of attention: FLOPs, bytes of weights, activations and KV caches, for every mechanism.

    Write a kind as in a run file: window(128), strided(64), big_bird(block=64, random=3). Quantities that training
    determines are assumed, or given as parameters: adaptive_span(span=314) sets the mean of the learned spans. Missing
    parameters take the values in the table. Mixtures by head and patterns are counted too. No model runs, so any
    size is possible:

        spanformer cost --length 1000000 --kinds full "window(4096)" "adaptive_span(span=314)"
        spanformer cost --kinds "Window(256) | Global([0])" "10 window(64) + 2 adaptive_span(span=1000)"
        spanformer cost --model runs/exits.toml --length 512
    """

    length: int = 8192
    """n, tokens per text"""
    heads: int = 12
    """query heads per layer"""
    dim: int = 768
    """size of hidden states; each head has size dim / heads"""
    kv_heads: int = 0
    """KV heads, which determine the size of the KV cache; 0: one for each query head"""
    layers: int = 1
    """number of layers; FLOPs, bytes and KV caches are totals over all layers"""
    batch: int = 1
    """texts per batch"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    causal: bool = True
    """hide the future from every token; --no-causal: every pattern in both directions"""
    kinds: tuple[str, ...] = ()
    """mechanisms such as "window(128)", mixtures or patterns; none: all mechanisms"""
    model: str = ""
    """a run file or a trained model: the cost of decoding one of its tokens after `length` others, by the number of
    layers that it runs through"""
    check: Literal["none", "softmax", "classifier", "saturation"] = "none"
    """with --model: what decides after each layer whether a token leaves"""
    published: bool = False
    """compare with the published tables of a textbook chapter on attention variants, and explain each
    difference"""
    json: str = ""
    """write every number to this file as JSON; -: write JSON to standard output instead of the table"""

    def __post_init__(self) -> None:
        for name in ("length", "heads", "dim", "layers", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}; expected a multiple of heads, {self.heads}")
        if self.check != "none" and not self.model:
            raise ValueError(f"check is {self.check!r} without a model; expected --model, a run file or a folder")
        for kind in self.kinds:
            for _, part in split_heads(kind, self.heads, "--kinds"):
                price(part, self.length, "--kinds")

    def sizes(self) -> Sizes:
        return Sizes(
            length=self.length,
            heads=self.heads,
            head_dim=self.dim // self.heads,
            kv_heads=self.kv_heads,
            batch=self.batch,
            layers=self.layers,
            item=ITEMS[self.dtype],
            causal=self.causal,
        )


def run(options: CostOptions) -> None:
    if options.model:
        _run_model(options)
        return
    sizes = options.sizes()
    costs = [layer_cost(kind, sizes, "--kinds") for kind in options.kinds or (*KINDS, *COSTED)]
    figures = [*memory_figures(), *flops_figures()] if options.published else []
    if options.json:
        _write(options, sizes, costs, figures)
    if options.json == "-":
        return
    console = Console(highlight=False)
    if options.published:
        _show_published(console, figures)
        return
    console.print(_table(options, sizes, costs, console.width))
    projections = 4 * sizes.times * options.length * options.dim * (options.dim + sizes.groups * sizes.head_dim)
    kept = layer_cost("full", sizes)
    assert kept.activation_bytes is not None
    said = (
        f"FLOPs are forward; a backward pass takes about 2.5 times as many. The projections around attention take "
        f"{amount(projections)} forward for every mechanism. Weights: one per visible pair. The kernel stores only "
        f"{decimal(sizes.kept_bytes)}, one number per query; a dense mask takes "
        f"{decimal(sizes.dense_bytes)}. For the backward pass the kernel keeps q, k, v, the output and that number, "
        f"{decimal(kept.activation_bytes)}; a dense implementation {decimal(kept.dense_activation_bytes)}. KV cache: "
        "keys and values up to the farthest that a later token can see. 1 MB = 10⁶ bytes."
    )
    console.print(said, style="dim")


def _run_model(options: CostOptions) -> None:
    from spanformer.cli.cost_depth import model_costs, show_model

    found = model_costs(options.model, options.length, options.check)
    if options.json:
        _save({"options": asdict(options), **found}, options.json)
    if options.json != "-":
        show_model(Console(highlight=False), options.model, options.length, found)


def _table(options: CostOptions, sizes: Sizes, costs: list[AttentionCost], width: int) -> Table:
    whole = layer_cost("full", sizes)
    where = f"{options.layers} layers" if options.layers > 1 else "one layer"
    texts = f"{options.batch} texts of " if options.batch > 1 else ""
    title = (
        f"Attention over {texts}{options.length:,} tokens, {where}, {options.heads} heads of {sizes.head_dim}, "
        f"{options.dtype}, {'causal' if options.causal else 'both directions'}"
    )
    names = ("kind", "keys a query", "FLOPs", "of full", "weights", "cache")
    rows = [
        (
            cost.kind + ("" if cost.cache_bytes is not None else " *"),
            NOTHING if cost.keys is None else f"{cost.keys:,.1f}",
            amount(cost.flops),
            percent(cost.flops / whole.flops),
            decimal(cost.weight_bytes),
            NOTHING if cost.cache_bytes is None else decimal(cost.cache_bytes),
        )
        for cost in costs
    ]
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(names[0], max_width=KIND_WIDTH)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    kinds, *numbers = (max(map(len, column)) for column in zip(names, *rows, strict=True))
    taken = sum(2 + n for n in (min(kinds, KIND_WIDTH), *numbers))
    wide = width >= max(WIDE, taken + 20)
    if wide:
        table.add_column("a query sees", no_wrap=True, overflow="ellipsis", width=width - taken)
    for cost, row in zip(costs, rows, strict=True):
        table.add_row(*row, *[cost.about] * wide)
    if options.causal and any(cost.cache_bytes is None for cost in costs):
        table.caption, table.caption_justify = "* reads the whole text in both directions; cannot decode", "left"
    return table


def _show_published(console: Console, figures: list[Figure]) -> None:
    title = "A chapter's figures (d = 768, 12 heads, float32, both directions) beside ours"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for at, name in enumerate(("mechanism", "tokens", "theirs", "ours", "", "")):
        table.add_column(name, justify="right" if at in (1, 2, 3) else "left", no_wrap=True)
    for figure in figures:
        verdict = "agrees" if figure.agrees else "differs"
        table.add_row(
            figure.what, f"{figure.length:,}", f"{figure.theirs:,.1f}", f"{figure.ours:,.1f}", figure.unit, verdict
        )
    console.print(table)
    for unit, title in (("MB", "memory"), ("GFLOP", "operations")):
        for name in dict.fromkeys(figure.what for figure in figures):
            some = [figure for figure in figures if figure.what == name and figure.unit == unit]
            if any(not figure.agrees for figure in some):
                console.print(f"{title} of {name}: {some[0].reason}")


def _write(options: CostOptions, sizes: Sizes, costs: list[AttentionCost], figures: list[Figure]) -> None:
    found: dict = {
        "options": asdict(options),
        "dense_bytes": sizes.dense_bytes,
        "kept_bytes": sizes.kept_bytes,
        "mechanisms": [cost.row() for cost in costs],
    }
    if figures:
        found["published"] = [asdict(figure) | {"agrees": figure.agrees} for figure in figures]
    _save(found, options.json)


def _save(found: dict, path: str) -> None:
    text = json.dumps(found, ensure_ascii=False, indent=1)
    if path == "-":
        print(text)
    else:
        write_text(Path(path), text + "\n")


COST = Command(CostOptions, run)
