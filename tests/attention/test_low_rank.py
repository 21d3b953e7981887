"""Low-rank attention for language models: its equation, causality, and reading by segments."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spanformer import LM, ModelConfig
from spanformer.attention import LowRank, View
from spanformer.kinds import KINDS
from spanformer.kinds.low_rank import KIND
from spanformer.model.config import AttentionConfig, PositionConfig
from support.low_rank_oracle import pooled
from support.reading import by_segments

PROJECT = KINDS["low_rank"].choices["project"]


def inputs(length: int, kv_heads: int = 4) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = (4, kv_heads, kv_heads)
    return [torch.randn(2, h, length, 8, dtype=torch.float64, generator=made).requires_grad_() for h in shapes]


def run(m: LowRank, q: Tensor, k: Tensor, v: Tensor, view: View | None = None) -> Tensor:
    view = view or View()
    return m(q, k, v, m.rule(view), view).out


def values(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(9))
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 101])
@pytest.mark.parametrize("project", PROJECT)
@pytest.mark.parametrize("padded", [False, True])
def test_equation(length: int, project: str, padded: bool) -> None:
    torch.manual_seed(0)
    m = LowRank(4, 8, 50, project=project).double()
    assert m.blocks == 5
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, : length // 2] = padded  # whole blocks, and a part of one
    q, k, v = inputs(length)
    leaves = [q, k, v, *m.parameters()]
    right = values(pooled(m, "low_rank", q, k, v, padding), leaves)
    for found, expected in zip(values(run(m, q, k, v, View(padding=padding)), leaves), right, strict=True):
        if expected is None:  # one block alone: nothing is pooled
            assert found is None or not found.any()
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", [1, 64])
def test_blocks_of_one_token_and_of_all(size: int) -> None:
    """Both are full attention: a pooled key of one token is its key."""
    m = LowRank(4, size, 64).double()
    q, k, v = inputs(61)
    score = q @ k.transpose(2, 3) / math.sqrt(8)
    expected = score.masked_fill(torch.ones(61, 61).triu(1).bool(), -math.inf).softmax(-1) @ v
    torch.testing.assert_close(run(m, q, k, v), expected)


@pytest.mark.parametrize("project", PROJECT)
@pytest.mark.parametrize("at", [1, 31, 32, 33])
@pytest.mark.parametrize("backend", ["native", "banded"])
def test_no_output_depends_on_later_tokens(project: str, at: int, backend: str) -> None:
    """Not by NaN: `attend` multiplies a hidden value of its tile by 0."""
    torch.manual_seed(0)
    m = LowRank(4, 8, 40, project=project)
    m.backend = backend
    q, k, v = (t.detach().float() for t in inputs(101))
    before = run(m, q, k, v)
    for t in (q, k, v):
        t[:, :, at:] = 1e4
    assert torch.equal(run(m, q, k, v)[:, :, :at], before[:, :, :at])


def model(kind: str, position: str = "rotary", **changes) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=11, dim=32, layers=2, heads=4, position=PositionConfig(kind=position, length=128),
        attention=AttentionConfig(kind=kind, max_span=40), **changes,
    )  # fmt: skip
    return LM(config).double()


@pytest.mark.parametrize("project", PROJECT)
@pytest.mark.parametrize("cuts", [[1, 2, 3], [64], [33, 50, 51, 97], [40, 80]])
@pytest.mark.parametrize("kv_heads", [0, 2])
def test_segments_equal_one_pass(project: str, cuts: list[int], kv_heads: int) -> None:
    lm = model(f"low_rank(7, 40, {project})", "sinusoidal" if project == "max" else "rotary", kv_heads=kv_heads)
    x = torch.randint(11, (2, 200), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(by_segments(lm, x, cuts), lm(x).logits)


def test_reversible_stack() -> None:
    lm = model("low_rank(7)", stack="reversible")
    x = torch.randint(11, (2, 60))
    lm(x, targets=x).nll.mean().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert all(p.grad is not None for p in lm.parameters())


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100])
def test_cost_counts_the_pairs(n: int) -> None:
    """Against a count: own tokens up to now, and finished blocks."""
    p = SimpleNamespace(size=8, max_span=40, project="mean")
    counted = sum(i % 8 + 1 + min(i // 8, 4) for i in range(n))
    assert KIND.cost.pairs is not None and KIND.cost.pairs(n, True, p) == counted


def test_refusals() -> None:
    lm = model("low_rank(7)")
    with pytest.raises(ValueError, match=r"LowRank has no KV cache: .* Score the text by segments instead"):
        lm.cache(1)
    with pytest.raises(ValueError, match=r"LowRank cannot share a layer with other kinds"):
        model("2 low_rank(7) + 2 window(8)")
    with pytest.raises(ValueError, match=r"size 41 and max_span 40; expected .* a block within max_span"):
        model("low_rank(41)")
    with pytest.raises(ValueError, match=r"project in .* is 'learned'; expected one of mean, max, convolution"):
        model("low_rank(7, project=learned)")
    with pytest.raises(ValueError, match=r"Alibi depends on distances, and a pooled key has no position"):
        model("low_rank(7)", "alibi")(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"the maximum of rotated keys depends on where the text begins"):
        model("low_rank(7, project=max)")(torch.zeros(1, 9, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"documents was given; a pooled key stands for a block of tokens"):
        lm(torch.zeros(1, 9, dtype=torch.int64), documents=torch.zeros(1, 9, dtype=torch.int64))
