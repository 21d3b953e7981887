"""The minimum cost of a training step of a language model: operations and bytes.

B sequences of T tokens in a step, L layers of width E, H query heads and G key/value heads of size D, N persistent
vectors a head, V symbols. A multiply and its add are two operations. M is what a layer keeps of the past: the hidden
states of the tokens before the block, cached without gradient.

    a matrix of n weights used by each of the step's B·T tokens costs 2·n·B·T forward, and as much again for the
    gradient of its input and as much for that of its weights: 6·n·B·T in all

    projections   n = E·D·(H + G + G + H)   queries, keys, values, output; in each of L layers
    feedforward   n = Shape.feedforward     in each of L layers
    output        n = E·V                   once; looking up an embedding multiplies nothing

    attention     a head of reach r has pairs(r) pairs of query and key (cost/attention.py), each 4·D forward and
                  10·D backward: B·14·D·Σ_heads pairs(r). Once the memory is full every query sees r keys: T·r pairs
    persistent    every query of every head also sees N keys that are no tokens: B·14·D·T·H·N in each layer

    reprojection  cached states become keys and values again in each step. A key/value head needs them only as far
                  back as the first token of the block looks through any of its query heads: C = min(r − 1, M) states,
                  r the longest reach of the group. Keys and values are 2 products of 2·E·D·C forward; backward has
                  only the gradient of the weights, for the states need none, again as much: B·8·E·D·ΣC over G heads

Norms, softmax, biases and distance tables are left out: they do not grow with a product of two sizes, or are what an
implementation spends beyond the least. All numbers are stored in 4 bytes:

    state_bytes       4·B·E·ΣM over layers
    key_value_bytes   4·B·2·D·Σ(T + C) over layers and key/value heads
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from spanformer.core.shape import Shape
from spanformer.cost.attention import PER_PAIR, head_pairs

DENSE = 3 * 2  # forward, gradient of the input, gradient of the weights; a multiply and an add each
CACHED = 2 * 2  # forward and gradient of the weights
ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class StepCost:
    """Operations of one training step, forward and backward, by what they are spent on; and bytes held meanwhile."""

    attention: int
    reprojection: int
    projections: int
    feedforward: int
    output: int
    persistent: int
    state_bytes: int
    key_value_bytes: int

    @property
    def total(self) -> int:
        """All operations."""
        return sum(self.parts().values())

    @property
    def by_span(self) -> int:
        """The operations that the spans decide: pairs in reach, and the memory projected again for them."""
        return self.attention + self.reprojection

    def parts(self) -> dict[str, int]:
        """Operations by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.endswith("_bytes")}


def full(shape: Shape) -> list[list[int]]:
    """[layers][heads] the reach of full attention: max_span everywhere."""
    return [[shape.max_span] * shape.heads for _ in range(shape.layers)]


def step_cost(shape: Shape, reach: Sequence[Sequence[int]], memory: Sequence[int] | None = None) -> StepCost:
    """The least cost of a training step whose heads have these reaches.

    reach: [layers][heads] distances a head looks at, its own token the first. memory: [layers] states cached before
    the block; when not given, as many as the layer's longest head needs, which is how a long run spends its time.
    """
    _check(shape, reach, memory)
    if memory is None:
        memory = [max(0, max(layer) - 1) for layer in reach]
    group = shape.heads // shape.kv_heads
    pairs, cached = 0, 0
    for layer, kept in zip(reach, memory, strict=True):
        pairs += sum(head_pairs(r, shape.block, shape.block + kept) for r in layer)
        longest = [max(layer[at : at + group]) for at in range(0, shape.heads, group)]
        cached += sum(min(max(0, r - 1), kept) for r in longest)
    weights = shape.dim * shape.head_dim
    per_pair = PER_PAIR["forward+backward"] * shape.head_dim
    vectors = shape.layers * shape.heads * shape.persistent
    key_values = shape.layers * shape.kv_heads * shape.block + cached
    return StepCost(
        attention=shape.batch * per_pair * pairs,
        reprojection=shape.batch * 2 * CACHED * weights * cached,
        projections=shape.tokens * DENSE * shape.layers * weights * 2 * (shape.heads + shape.kv_heads),
        feedforward=shape.tokens * DENSE * shape.layers * shape.feedforward,
        output=shape.tokens * DENSE * shape.dim * shape.vocab,
        persistent=shape.tokens * per_pair * vectors,
        state_bytes=ITEM * shape.batch * shape.dim * sum(memory),
        key_value_bytes=ITEM * shape.batch * 2 * shape.head_dim * key_values,
    )


def _check(shape: Shape, reach: Sequence[Sequence[int]], memory: Sequence[int] | None) -> None:
    sizes = [len(layer) for layer in reach]
    if sizes != [shape.heads] * shape.layers:
        raise ValueError(f"reach has {sizes} heads by layer; expected {shape.layers} layers of {shape.heads}")
    if shortest := min((r for layer in reach for r in layer if r < 0), default=0):
        raise ValueError(f"reach holds {shortest}; expected 0 or more distances")
    if memory is not None and (len(memory) != shape.layers or min(memory) < 0):
        raise ValueError(f"memory is {list(memory)}; expected 0 or more states for each of {shape.layers} layers")
