"""Low-rank attention for language models: its equation, causality, and reading by segments."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spanformer import LM, ModelConfig
from spanformer.attention import LowRank, View
from spanformer.kinds import KINDS
from spanformer.kinds.low_rank import KIND
from spanformer.memory import Cache
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


def text(rows: int, length: int) -> Tensor:
    return torch.randint(11, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("project", PROJECT)
@pytest.mark.parametrize("size, kv_heads", [(1, 0), (7, 2), (40, 0)])
@pytest.mark.parametrize("cuts", [list(range(1, 50)), [33, 50, 51, 67], []])
def test_cache_equals_one_pass(project: str, size: int, cuts: list[int], kv_heads: int) -> None:
    position = "sinusoidal" if project == "max" else "rotary"
    lm = model(f"low_rank({size}, 40, {project})", position, kv_heads=kv_heads).eval()
    x, cache = text(2, 70), lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.tensor_split(cuts, 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), lm(x).logits)


@pytest.mark.parametrize("slack", [3, 9])
def test_cache_with_rows_of_different_lengths_is_cropped_forked_and_saved(slack: int, tmp_path: Path) -> None:
    lm = model("low_rank(5, 20)").eval()
    x, cache = text(3, 60), lm.cache(3, slack=slack)
    seen = [30, 22, 27]
    lm.decode(x[:, :30], cache, lengths=torch.tensor(seen))
    kept = [seen[0], seen[1] - slack, seen[2] - 2]
    cache.crop(torch.tensor(kept))
    lm.decode(x[:, 30:32], cache, lengths=torch.tensor([2, 0, 1]))
    kept = [[*range(n), *range(30, 30 + m)] for n, m in zip(kept, (2, 0, 1), strict=True)]
    cache.reorder(torch.tensor([2, 1]))
    cache.save(tmp_path / "cache")
    fork = Cache.load(tmp_path / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        after = lm.decode(x[rows, 32:], one)
        for n, row in enumerate(rows):
            whole = lm(torch.cat([x[row : row + 1, kept[row]], x[row : row + 1, 32:]], 1)).logits
            torch.testing.assert_close(after[n], whole[0, len(kept[row]) :])


def test_crop_beyond_slack_changes_nothing() -> None:
    lm = model("low_rank(5, 20)").eval()
    cache = lm.cache(1, slack=2)
    lm.decode(text(1, 12), cache)
    with pytest.raises(ValueError, match=r"row 0 cannot be cropped by 3 tokens: at most 2 tokens|at most 2"):
        cache.crop(torch.tensor([9]))
    assert cache.seen.tolist() == [12]


def test_bytes_are_those_of_a_block_and_of_one_key_for_each_before_it() -> None:
    lm = model("low_rank(5, 40)", kv_heads=2).eval()
    assert lm.cache(3).bytes() == 2 * 3 * (2 * 2 * (5 + 7) * 8 * 8 + 2 * 8)  # layers · rows · (numbers, two counts)
    assert lm.cache(3, slack=6).bytes() == 2 * 3 * (2 * 2 * (5 + 6 + 7 + 2) * 8 * 8 + 2 * 8)


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
