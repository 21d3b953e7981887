"""The minimum cost of a training step of a language model: operations and bytes.

B sequences of T tokens per step, L layers of width E, H query heads and G key/value heads of size D, N persistent
vectors per head, a vocabulary of V. A multiply and an add are two operations. M is the length of a layer's segment
memory: hidden states of the tokens before the segment, without gradient.

    a matrix of n weights that multiplies each of the step's B·T tokens costs 2·n·B·T forward, the same for the gradient
    of its input, and the same for the gradient of its weights: 6·n·B·T in all

    projections   n = E·D·(H + G + G + H)   queries, keys, values, output; in each of L layers
    feedforward   n = Shape.feedforward     in each of L layers
    output        n = E·V                   once; an embedding lookup costs no operations

    attention     a head of reach r has pairs(r) query–key pairs (cost/attention.py), each 4·D forward and 10·D
                  backward: B·14·D·Σ_heads pairs(r). Once the memory is full every query sees r keys: T·r pairs
    persistent    every query of every head also sees N persistent keys: B·14·D·T·H·N in each layer

    reprojection  each step projects the remembered states to keys and values again. A key/value head needs only the
                  C = min(r − 1, M) states that the first token of the segment sees, r being the longest reach among
                  its query heads. Keys and values are 2 products of 2·E·D·C forward; backward has only the gradient
                  of the weights, which costs the same: B·8·E·D·ΣC over G heads

Norms, softmax, biases and distance tables are not counted: they do not grow with a product of two sizes, or are
overhead of an implementation. Every number takes 4 bytes:

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
    """Operations of one training step, forward and backward, by purpose; and the bytes of its memory."""

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
        """The operations that depend on the spans: pairs in reach, and the reprojection of the memory."""
        return self.attention + self.reprojection

    def parts(self) -> dict[str, int]:
        """Operations by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if not field.name.endswith("_bytes")}


def full(shape: Shape) -> list[list[int]]:
    """[layers][heads] reaches of full attention: max_span everywhere."""
    return [[shape.max_span] * shape.heads for _ in range(shape.layers)]


def step_cost(shape: Shape, reach: Sequence[Sequence[int]], memory: Sequence[int] | None = None) -> StepCost:
    """The minimum cost of a training step with these reaches.

    reach: [layers][heads] number of distances that a head sees, its own token included. memory: [layers] remembered
    states before the segment; default: as many as the layer's longest head needs, the steady state of a run.
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
