"""`spanformer cost --length 8192 --heads 12 --dim 768`: what attention costs, mechanism by mechanism, by arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from spanformer.cli.leaf import Leaf
from spanformer.core.files import write_text
from spanformer.cost.mechanisms import (
    MECHANISMS,
    AttentionCost,
    Mechanism,
    Sizes,
    attention_cost,
    cost_of,
    find,
    together,
)
from spanformer.cost.published import Figure, flops_figures, memory_figures
from spanformer.model.kinds import is_pattern, parts_of
from spanformer.report.measures import NOTHING, amount, decimal, percent

ITEMS = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
WIDE = 140
"""columns of a terminal that has room for what each mechanism sees"""
LONGEST = 1 << 17
"""tokens, where pairs are counted"""


@dataclass(frozen=True)
class CostOptions:
    """What attention costs by arithmetic: FLOPs, bytes of weights, activations and caches, for every mechanism.

    A kind is written with its numbers: window:128, strided:64, big_bird:64:3:2:3, adaptive_span:314:32 (average span
    and ramp). Without numbers, those of the table are meant. Mixtures by head, and patterns, are counted too. Nothing
    is run, so any size can be asked for:

        spanformer cost --length 1000000 --kinds full window:4096 adaptive_span:314:32
        spanformer cost --kinds "Window(256) | Global([0])" "10 window:64 + 2 adaptive_span:1000:32"
    """

    length: int = 8192
    """n, tokens of a text"""
    heads: int = 12
    """query heads of a layer"""
    dim: int = 768
    """size of hidden states; a head has dim / heads numbers"""
    kv_heads: int = 0
    """key/value heads, which the cache holds; 0: one for each query head"""
    layers: int = 1
    """FLOPs, bytes and caches are of so many layers together"""
    batch: int = 1
    """texts side by side"""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    causal: bool = True
    """no token sees the future; --no-causal: every pattern in both directions"""
    kinds: tuple[str, ...] = ()
    """mechanisms, as window:128, mixtures or patterns; none: all mechanisms"""
    published: bool = False
    """hold the tables of a textbook chapter on attention variants against the same arithmetic, and say where they
    differ and why"""
    json: str = ""
    """write every number to this file as JSON; - writes it to standard output, and no table"""

    def __post_init__(self) -> None:
        for name in ("length", "heads", "dim", "layers", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.dim % self.heads:
            raise ValueError(f"dim is {self.dim}; expected a multiple of heads, {self.heads}")
        for kind in self.kinds:
            for _, part in _parts(kind, self.heads):
                _find(part)

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
    sizes = options.sizes()
    costs = [_cost(kind, sizes) for kind in options.kinds or MECHANISMS]
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
    kept = attention_cost("full", sizes)
    assert kept.activation_bytes is not None
    said = (
        f"FLOPs are forward; a backward pass takes about 2.5 times as many, and the projections around attention "
        f"{amount(projections)} forward, whatever the mechanism. Weights: one for each pair that is seen. Our kernel "
        f"stores none but {decimal(sizes.kept_bytes)}, one number a query; a dense mask takes "
        f"{decimal(sizes.dense_bytes)}. For the backward pass it keeps q, k, v, the output and that number, "
        f"{decimal(kept.activation_bytes)}; a dense implementation {decimal(kept.dense_activation_bytes)}. Cache: keys "
        "and values up to the farthest that a later token can see. 1 MB = 10⁶ bytes."
    )
    console.print(said, style="dim")


def _parts(kind: str, heads: int) -> list[tuple[int, str]]:
    """(heads, kind) of a mixture; all heads of one kind are one part."""
    parts = [(heads if count is None else count, part) for count, part in parts_of(kind)]
    if sum(count for count, _ in parts) != heads:
        raise ValueError(f"{kind!r} has {sum(count for count, _ in parts)} heads; expected {heads} (--heads)")
    return parts


def _find(kind: str) -> tuple[str, Mechanism, list[int]]:
    """Name, mechanism and numbers: one of the table, or a pattern as one."""
    if not is_pattern(kind):
        mechanism, numbers = find(kind)
        return ":".join([kind.split(":")[0], *map(str, numbers)]), mechanism, numbers
    from spanformer.attention.pattern import parse

    pattern = parse(kind)
    far = pattern.lookback() + 1

    def pairs(n: int, causal: bool) -> int:
        if n > LONGEST:
            raise ValueError(f"length is {n}; expected at most {LONGEST:,} for {pattern}, whose pairs are counted")
        return pattern.pairs(n, causal=causal)

    return str(pattern), Mechanism("the pattern", "", {}, pairs, lambda n: min(n, far), kept=None), []


def _cost(kind: str, sizes: Sizes) -> AttentionCost:
    parts, shared = _parts(kind, sizes.heads), sizes.heads // sizes.groups
    if any(count % shared for count, _ in parts):
        raise ValueError(f"{kind!r} divides heads that share keys; expected multiples of {shared} heads")
    costs = []
    for count, part in parts:
        name, mechanism, numbers = _find(part)
        if len(parts) > 1 and mechanism.alone(*numbers):
            raise ValueError(f"{name} mixes values in its own way, and shares a layer with no other kind")
        some = replace(sizes, heads=count, kv_heads=count // shared, width=sizes.dim)
        costs.append((count, cost_of(name, mechanism, numbers, some)))
    return costs[0][1] if len(costs) == 1 else together(kind, costs)


def _table(options: CostOptions, sizes: Sizes, costs: list[AttentionCost], width: int) -> Table:
    whole = attention_cost("full", sizes)
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
    for name in names:
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=name != "kind")
    taken = sum(2 + max(map(len, column)) for column in zip(names, *rows, strict=True))
    wide = width >= max(WIDE, taken + 20)
    if wide:
        table.add_column("a query sees", no_wrap=True, overflow="ellipsis", width=width - taken)
    for cost, row in zip(costs, rows, strict=True):
        table.add_row(*row, *[cost.about] * wide)
    if options.causal and any(cost.cache_bytes is None for cost in costs):
        table.caption, table.caption_justify = "* reads a text whole, in both directions; there is no decoding", "left"
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
    from dataclasses import asdict

    found: dict = {
        "options": asdict(options),
        "dense_bytes": sizes.dense_bytes,
        "kept_bytes": sizes.kept_bytes,
        "mechanisms": [cost.row() for cost in costs],
    }
    if figures:
        found["published"] = [asdict(figure) | {"agrees": figure.agrees} for figure in figures]
    text = json.dumps(found, ensure_ascii=False, indent=1)
    if options.json == "-":
        print(text)
    else:
        write_text(Path(options.json), text + "\n")


COST = Leaf(CostOptions, run)
