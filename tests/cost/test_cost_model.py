"""The arithmetic of a training step, against counting one by one and against counted matrix products."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spanformer.core.shape import Shape
from spanformer.cost.model import StepCost, full, step_cost

SHAPE = Shape(
    layers=2, dim=12, heads=4, kv_heads=2, head_dim=5, feedforward=96, persistent=3, vocab=17, block=7, batch=3,
    max_span=11,
)  # fmt: skip
REACH = [[1, 3, 0, 0], [11, 2, 9, 10]]


def brute(shape: Shape, reach: list[list[int]], memory: list[int]) -> dict[str, int]:
    """Every query, key, state and weight counted by itself; one sequence of the batch after the other."""
    found = dict.fromkeys((field.name for field in dataclasses.fields(StepCost)), 0)
    group = shape.heads // shape.kv_heads
    for _ in range(shape.batch):
        for layer, kept in zip(reach, memory, strict=True):
            seen = [set() for _ in range(shape.kv_heads)]  # cached places a key/value head is asked for
            for head, r in enumerate(layer):
                for query in range(kept, kept + shape.block):
                    for key in range(kept + shape.block):
                        if 0 <= query - key < r:
                            found["attention"] += 7 * 2 * shape.head_dim  # 2 products forward, 5 backward
                            if key < kept:
                                seen[head // group].add(key)
                    found["persistent"] += shape.persistent * 7 * 2 * shape.head_dim
            for places in seen:
                for _ in places:
                    for _ in ("keys", "values"):
                        found["reprojection"] += 2 * 2 * shape.dim * shape.head_dim  # forward, weight gradient
                found["key_value_bytes"] += 2 * 4 * shape.head_dim * (shape.block + len(places))
            found["state_bytes"] += 4 * kept * shape.dim
            for _ in range(shape.block):
                wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
                for width in (wide, narrow, narrow, wide):
                    found["projections"] += 3 * 2 * shape.dim * width
                found["feedforward"] += 3 * 2 * shape.feedforward
        found["output"] += shape.block * 3 * 2 * shape.dim * shape.vocab
    return found


@pytest.mark.parametrize("block", [1, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("memory", [None, [0, 0], [2, 4], [0, 10], [6, 30]])
def test_formulas_equal_counting(block, kv_heads, memory):
    shape = dataclasses.replace(SHAPE, block=block, kv_heads=kv_heads)
    kept = [2, 10] if memory is None else memory
    assert dataclasses.asdict(step_cost(shape, REACH, memory)) == brute(shape, REACH, kept)


def test_full_attention_reaches_max_span_everywhere():
    assert full(SHAPE) == [[11] * 4] * 2
    cost = step_cost(SHAPE, full(SHAPE))
    assert cost.attention == 3 * 14 * 5 * 2 * 4 * 7 * 11
    assert cost.by_span == cost.attention + cost.reprojection
    assert cost.total == sum(cost.parts().values()) == sum(list(dataclasses.asdict(cost).values())[:6])


def test_only_span_dependent_parts_depend_on_spans():
    learned, whole = step_cost(SHAPE, REACH), step_cost(SHAPE, full(SHAPE))
    assert learned.by_span < whole.by_span and learned.key_value_bytes < whole.key_value_bytes
    assert learned.total - learned.by_span == whole.total - whole.by_span


def test_dense_parts_equal_counted_matrix_products():
    """A layer's projections and feed-forward, the output and the re-projection, run and counted by torch."""
    shape = dataclasses.replace(SHAPE, layers=1, feedforward=2 * 12 * 8)
    e, d, h, g = shape.dim, shape.head_dim, shape.heads, shape.kv_heads
    cost = step_cost(shape, [[4, 4, 4, 4]])

    def counted(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    x = torch.randn(shape.tokens, e, requires_grad=True)
    weights = {
        "projections": [(e, h * d), (e, g * d), (e, g * d), (h * d, e)],
        "feedforward": [(e, 8), (8, e)],
        "output": [(e, shape.vocab)],
    }
    for name, sizes in weights.items():

        def run(sizes=sizes):
            for rows, columns in sizes:
                wide = x if rows == e else torch.randn(shape.tokens, rows, requires_grad=True)
                (wide @ torch.randn(rows, columns, requires_grad=True)).sum().backward()

        assert counted(run) == getattr(cost, name), name

    states = torch.randn(shape.batch * 3, e)  # a reach of 4 asks for 3 states before the block
    w = torch.randn(e, 2 * g * d, requires_grad=True)
    assert counted(lambda: (states @ w).sum().backward()) == cost.reprojection


def test_attention_equals_counted_matrix_products():
    """One head, all of whose queries see the same number of keys: the seven products, run as such."""
    shape = dataclasses.replace(SHAPE, layers=1, heads=1, kv_heads=1, batch=1, block=1)
    q, do, k, v, row = *torch.randn(2, 1, 5), *torch.randn(2, 9, 5), torch.randn(1, 9)
    q, do = q.view(1, 5), do.view(1, 5)
    with FlopCounterMode(display=False) as counter:
        _ = q @ k.T, row @ v  # forward
        _ = q @ k.T, do @ v.T, row @ k, row.T @ q, row.T @ do  # backward: scores again, then into p, q, k, v
    assert counter.get_total_flops() == step_cost(shape, [[9]]).attention


@pytest.mark.parametrize(
    "reach, memory, said",
    [
        ([[1, 1, 1, 1]], None, r"reach has \[4\] heads by layer; expected 2 layers of 4"),
        ([[1, 1, 1, 1], [1, 1, 1]], None, r"reach has \[4, 3\]"),
        ([[1, 1, 1, 1], [1, 1, -2, 1]], None, "reach holds -2; expected 0 or more"),
        (REACH, [1], r"memory is \[1\]; expected 0 or more states for each of 2 layers"),
        (REACH, [1, -1], r"memory is \[1, -1\]"),
    ],
)
def test_reaches_that_do_not_fit_are_refused(reach, memory, said):
    with pytest.raises(ValueError, match=said):
        step_cost(SHAPE, reach, memory)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"layers": 0}, "layers is 0; expected a whole number, 1 or more"),
        ({"feedforward": -1}, "feedforward is -1; expected a whole number, 0 or more"),
        ({"dim": 2.5}, "dim is 2.5"),
        ({"block": True}, "block is True"),
        ({"kv_heads": 3}, "kv_heads is 3; expected a number that divides heads, 4"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(SHAPE, **change)
