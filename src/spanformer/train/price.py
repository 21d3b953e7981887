"""One price for how far tokens look and how deep they go: nats that a million operations of a decoded token cost.

    loss += price · (E[depth] · c_layer + Σ_layers Σ_heads span · 4·D)

c_layer: the operations of one more layer (cost/depth.py), with the keys of heads whose spans are fixed; every distance
of a learned span costs the 4·D operations of a query and key of size D. The price becomes the penalty of spans, the
ponder cost of adaptive computation time (nats a step), and the price of exits (nats a layer, as the likelihood oracle
has it). A layer's spans are priced as if every token reached it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from spanformer.cost.attention import FORWARD
from spanformer.cost.depth import token_cost
from spanformer.model.config import ModelConfig
from spanformer.model.load import MODELS
from spanformer.model.meta import build_on_meta
from spanformer.train.config import RunConfig
from spanformer.train.run_events import model_shape

SPANS = ("adaptive_span", "dynamic_span")
UNIT = 1e6
"""operations that train.flop_price is for"""


class Prices(NamedTuple):
    """In nats per token."""

    span: float
    """of one more distance in the mean span of a layer's heads"""
    layer: float
    """of one more layer"""


def priced(config: RunConfig) -> RunConfig:
    """The configuration with the penalties that train.flop_price means; itself without a price."""
    if not config.train.flop_price:
        return config
    m, price = config.model, config.train.flop_price
    where = f"train.flop_price is {price:g}"
    if m.kind != "lm":
        raise ValueError(f"{where} and model.kind is {m.kind!r}; expected 'lm', whose tokens are decoded one by one")
    if m.attention.budget:
        raise ValueError(
            f"{where} and model.attention.budget {m.attention.budget:g}, which finds a price of its own; expected "
            "one of the two"
        )
    if any(len(layer) > 1 and any(spec.kind in SPANS for spec in layer) for layer in m.layer_specs()):
        raise ValueError(
            f"{where}, and model.attention.kind mixes learned spans with other heads, whose penalty is for the mean of "
            "the spans; expected one kind for all heads of a layer, or train.flop_price 0 and model.attention.penalty"
        )
    d = m.depth
    if d.kind == "exits" and (d.classifier in ("none", "calm") or d.oracle != "likelihood"):
        raise ValueError(
            f"{where}, and the exits have classifier {d.classifier!r} and oracle {d.oracle!r}; expected classifier "
            "geometric, multinomial or sequence with oracle likelihood, whose price is in nats"
        )
    found = prices(m, config.train.block, price)
    depth = replace(d, cost=found.layer, price=found.layer)
    return replace(config, model=replace(m, attention=replace(m.attention, penalty=found.span), depth=depth))


def prices(model: ModelConfig, block: int, price: float) -> Prices:
    """price: nats per million operations; block: tokens of a segment."""
    per_distance = FORWARD * model.head_dim * model.heads
    return Prices(price / UNIT * per_distance, price / UNIT * operations_of_a_layer(model, block))


def operations_of_a_layer(model: ModelConfig, block: int) -> float:
    """The mean operations that one more layer costs a token, without the distances of learned spans."""
    known = replace(model, vocab=model.vocab or 256)
    lm = build_on_meta(lambda: MODELS[known.kind](known))
    shape = model_shape(lm, block, 1)
    learned = [any(spec.kind in SPANS for spec in layer) for layer in model.layer_specs()]
    each = zip(lm.mechanisms(), learned, strict=True)
    reach = [[0] * model.heads if learns else [n + 1 for n in m.context_length()] for m, learns in each]
    first, last = (token_cost(shape, reach, 1 << 40, n).total for n in (1, shape.layers))
    return (
        (last - first) / (shape.layers - 1) if shape.layers > 1 else float(token_cost(shape, reach, 1 << 40, 1).layers)
    )
