"""conftest.py's NaN in uninitialised memory: it is there, it catches, and it stays out of torch's way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def copy_all_but_the_last(source: Tensor, empty) -> Tensor:
    """A kernel with the usual fault."""
    out = empty(source)
    out[:-1] = source[:-1]
    return out


EMPTY = {
    "empty": lambda t: torch.empty(t.shape, dtype=t.dtype),
    "empty_like": lambda t: torch.empty_like(t),
    "new_empty": lambda t: t.new_empty(t.shape),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_forgotten_element_is_nan(name: str, dtype: torch.dtype) -> None:
    out = copy_all_but_the_last(torch.zeros(5, dtype=dtype), EMPTY[name])
    assert out.isnan().tolist() == [False] * 4 + [True]


def test_other_dtypes_and_sizes_are_left_alone() -> None:
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert torch.empty(2, 0).shape == (2, 0)
    assert torch.zeros(3, dtype=torch.bool).new_empty(2).shape == (2,)


def test_leaf_that_requires_grad_stays_one() -> None:
    leaf = torch.empty(3, requires_grad=True)
    assert leaf.is_leaf and leaf.requires_grad and leaf.isnan().all()
    assert not torch.nn.Linear(3, 3).weight.isnan().any()  # made empty, then initialised


def test_meta_and_fake_tensors_have_no_memory_to_poison() -> None:
    assert torch.empty(3, device="meta").is_meta
    with torch.device("meta"):
        assert torch.empty(3).is_meta
    with FakeTensorMode():
        assert torch.empty(3).shape == (3,)


def test_compiled_code_is_not_poisoned() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, _inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def filled(t: Tensor) -> Tensor:
        return torch.empty_like(t).copy_(t) + t.new_empty(t.shape).copy_(t)

    assert filled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert seen and not any("fill_" in target for target in seen)
