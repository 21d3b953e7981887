"""Spans as text for a terminal: a table in tokens with bars, and a paragraph about a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from spanformer.report.drawing import span_ticks
from spanformer.report.events import Run
from spanformer.report.measures import (
    amount,
    bits_per_unit,
    counted_share,
    evals,
    exact,
    lasting,
    looks_back,
    mean_depth,
    percent,
    predicted,
    share,
    tokens,
)

WIDTH = 32  # characters of a bar that reaches the limit
EIGHTHS, HEIGHTS = " ▏▎▍▌▋▊▉", "▁▂▃▄▅▆▇█"


def spans_table(
    spans: Sequence[Sequence[float | None]], reach: Sequence[Sequence[int]], max_span: int, *, ascii_only: bool = False
) -> str:
    """Every head's span and reach in tokens, layer by layer, with bars on a logarithmic scale.

    spans, reach: [layers][heads]; None or NaN for a head that learns no span. A bar is solid up to
    the span and shaded over the ramp, up to the reach.
    """
    sizes = [len(layer) for layer in reach]
    if not sizes or not all(sizes) or sizes != [len(layer) for layer in spans]:
        raise ValueError(f"spans has {[len(layer) for layer in spans]} heads by layer; expected {sizes}, as reach has")
    if max_span < 1:
        raise ValueError(f"max_span is {max_span}; expected at least 1 token")
    top = max(max_span, *(r for layer in reach for r in layer))
    lines = [f"{'head':>12}     span     sees  {_ruler(top)}  tokens"]
    for number, (z_of, r_of) in enumerate(zip(spans, reach, strict=True), start=1):
        looks = [float(r if z is None or math.isnan(z) else z) for z, r in zip(z_of, r_of, strict=True)]
        lines.append(
            f"layer {number:<3} {_picture(looks, top, ascii_only)}  mean {tokens(float(np.mean(looks)))}, "
            f"longest {tokens(max(looks))}"
        )
        for head, (z, r, look) in enumerate(zip(z_of, r_of, looks, strict=True), start=1):
            shown = "none" if z is None or math.isnan(z) else f"{z:,.1f}"
            lines.append(f"{head:12} {shown:>8} {r:8,}  {_bar(look, float(r), top, ascii_only)}".rstrip())
    looks = "span: tokens seen fully; sees: distances looked at, the ramp included; limit "
    return "\n".join([*lines, f"{looks}{max_span:,}"])


def _height(look: float, top: float) -> float:
    """0 … 1, each doubling nearly the same."""
    return min(1.0, math.log2(1 + look) / math.log2(1 + top))


def _ruler(top: float) -> str:
    """Numbers of tokens, each beginning where a bar of that many ends."""
    line = ""
    for tick in span_ticks(top):
        line = line.ljust(round(WIDTH * _height(tick, top)))
        line += f"{tick:,}" if not line or line.endswith(" ") else ""
    return line


def _bar(look: float, reach: float, top: float, ascii_only: bool) -> str:
    solid, shaded = WIDTH * _height(look, top), round(WIDTH * _height(reach, top))
    if ascii_only:
        return ("#" * round(solid)).ljust(shaded, ".")
    whole, eighth = divmod(round(8 * solid), 8)
    return ("█" * whole + (EIGHTHS[eighth] if eighth else "")).ljust(shaded, "░")


def _picture(looks: list[float], top: float, ascii_only: bool) -> str:
    """One character per head."""
    shades = ".:-=+*#@" if ascii_only else HEIGHTS
    return "".join(shades[min(7, int(8 * _height(look, top)))] for look in looks)


def summary(run: Run) -> str:
    """A short paragraph: how long, how good, how far heads look, and what that costs."""
    if not run.steps:
        return f"{run.name} has {amount(run.start.parameters)} parameters and recorded no step yet."
    last, unit = run.steps[-1], run.start.bits_unit
    said = [f"{run.name}: {last.step:,} steps over {amount(last.tokens)} tokens in {lasting(last.seconds)}."]
    valid = evals(run, "valid")
    if len(valid) > 1:
        said.append(f"Validation went from {valid[0].bits:.3f} to {valid[-1].bits:.3f} bits per {unit}.")
    elif valid:
        said.append(f"Validation is at {valid[0].bits:.3f} bits per {unit}.")
    elif math.isfinite(last.loss):
        said.append(f"Training is at {bits_per_unit(run, last.loss):.3f} bits per {unit}; it was never validated.")
    else:
        said.append("Its last loss is not a number.")
    if (right := exact(run)) is not None:
        said.append(f"{right[0].capitalize()}: {100 * right[1]:.2f} %.")
    if math.isfinite(depth := mean_depth(run)):
        said.append(f"A token takes {depth:.2f} of {run.start.shape.layers} layers on average.")
    looks, back = looks_back(last), "back " if run.start.objective in ("lm", "task", "image") else ""
    said.append(
        f"Heads look {back}{tokens(float(looks.mean()))} tokens on average and "
        f"{tokens(float(looks.max()))} at most, of {run.start.shape.max_span:,} allowed"
    )
    costs = predicted(run)
    if costs is not None:
        said[-1] += f"; attention needs {percent(share(costs[0].by_span, costs[1].by_span))} of full attention's FLOPs"
    elif math.isfinite(counted := counted_share(run)):
        said[-1] += f"; a step needs {percent(counted)} of the FLOPs that it would with full attention"
    return " ".join(said) + "."
