"""A tensor that was changed in place between forward and backward: autograd refuses; no gradient is silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spanformer import BlockIndex, Rule, attend

B, H, T, D = 1, 2, 24, 8
BACKENDS = ("native", "banded")


def tensors() -> dict[str, Tensor]:
    return {
        "q_positions": torch.arange(T).flip(0).contiguous(),
        "k_positions": torch.arange(T).flip(0).contiguous(),
        "documents": torch.arange(T) // 8,
        "reach": torch.tensor([5, 9]),
        "key_bias": torch.zeros(1, 1, T),
        "distance_bias": torch.zeros(H, T),
        "sink_logits": torch.zeros(H),
        "span": torch.tensor([3.0, 6.0]),
    }


def call(backend: str, q: Tensor, given: dict[str, Tensor], blocks: BlockIndex | None = None) -> Tensor:
    positions = {name: given[name] for name in ("q_positions", "k_positions") if blocks is None}
    terms = {name: t for name, t in given.items() if not name.endswith("_positions")}
    return attend(q, q, q, Rule(H, ramp=4.0, blocks=blocks, **terms), backend=backend, **positions).out


@pytest.mark.parametrize("name", sorted(tensors().keys() - {"reach"}))
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_changed_before_the_backward_pass_is_refused(backend: str, name: str) -> None:
    given, q = tensors(), torch.randn(B, H, T, D, requires_grad=True)
    out = call(backend, q, given)
    given[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["offsets", "columns", "mask_ids", "masks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pattern_changed_before_the_backward_pass_is_refused(backend: str, name: str) -> None:
    blocks = BlockIndex.from_dense(torch.rand(T, T) < 0.5, 8)
    q = torch.randn(B, H, T, D, requires_grad=True)
    out = call(backend, q, {}, blocks)
    getattr(blocks, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ("reference", *BACKENDS))
def test_rule_has_its_own_reach(backend: str) -> None:
    reach, q = torch.tensor([5, 9]), torch.randn(B, H, T, D, requires_grad=True)
    rule = Rule(H, reach=reach)
    grads = []
    for change in (0, 10):
        out = attend(q, q, q, rule, backend=backend).out
        reach.add_(change)
        grads.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(grads[0], grads[1]) and rule.reach_list() == [5, 9]
