"""Heads that choose among all keys in reach, in language models: by segments, from a KV cache, and beside windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spanformer import LM
from spanformer.memory import Cache
from spanformer.memory.key_ring import KeyRing
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig

KINDS = (
    "indexed(4, 16)", "indexed(5, 12, learned=true)", "2 window(5) + 4 indexed(3, 9)", "indexed(99, 64)", "hard(12)",
    "hard_sampled(64)", "4 hard(7) + 2 window(6)",
)  # fmt: skip


@pytest.fixture(params=KINDS)
def lm(request: pytest.FixtureRequest) -> LM:
    return make(request.param)


def make(kind: str, kv_heads: int = 3, position: str = "rotary") -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=kind, ramp=4.0, init=0.3)
    config = ModelConfig(
        vocab=31, dim=48, layers=2, heads=6, kv_heads=kv_heads, position=PositionConfig(kind=position),
        attention=attention,
    )  # fmt: skip
    return LM(config).double().eval()


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(31, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cuts", [[4, 9], [1, 2, 3], [30], [10, 20]])
def test_segments_equal_one_pass(lm: LM, cuts: list[int]) -> None:
    x = text(2, 37)
    parts, state = [], None
    for piece in x.tensor_split(cuts, 1):
        found = lm(piece, state)
        parts.append(found.logits)
        state = found.state
    torch.testing.assert_close(torch.cat(parts, 1), lm(x).logits)


def test_segments_with_documents_and_padding_equal_one_pass(lm: LM) -> None:
    x, documents = text(2, 37), (torch.arange(37) // 11).expand(2, 37)
    padding = torch.arange(37) >= torch.tensor([37, 33])[:, None]
    padding = padding | (torch.arange(37) == 14)
    parts, state, cuts = [], None, [9, 10, 25]
    for piece in zip(*(t.tensor_split(cuts, 1) for t in (x, documents, padding)), strict=True):
        found = lm(piece[0], state, documents=piece[1], padding=piece[2])
        parts.append(found.logits)
        state = found.state
    whole = lm(x, documents=documents, padding=padding).logits
    torch.testing.assert_close(torch.cat(parts, 1)[~padding], whole[~padding])


@pytest.mark.parametrize("sizes", [[37], [1] * 37, [3, 1, 8, 25]])
def test_cache_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x, cache = text(2, 37), lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.split(sizes, 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), lm(x).logits)


@pytest.mark.parametrize("kind", ["indexed(4, 16)", "hard(12)"])
def test_equal_tokens_are_chosen_alike_in_float32(kind: str) -> None:
    """Without positions in the embeddings, equal tokens have equal codes: which one is taken must not depend on how
    sums round."""
    lm, x = make(kind).float(), text(2, 60) % 3
    cache = lm.cache(2)
    parts = [lm.decode(piece, cache) for piece in x.split([20, *[1] * 20, 20], 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), lm(x).logits, rtol=1e-4, atol=1e-4)


def test_cache_with_rows_of_different_lengths(lm: LM) -> None:
    x, cache = text(2, 24), lm.cache(2, slack=3)
    lm.decode(x[:, :19], cache, lengths=torch.tensor([19, 8]))
    cache.crop(torch.tensor([17, 7]))
    after = lm.decode(x[:, 19:], cache)
    for row, n in enumerate([17, 7]):
        whole = lm(torch.cat([x[row : row + 1, :n], x[row : row + 1, 19:]], 1)).logits
        torch.testing.assert_close(after[row], whole[0, n:])


def test_a_row_that_waits_is_not_overwritten(lm: LM) -> None:
    """Padding behind a row's tokens takes no slot, however much of it there is."""
    x, cache = text(2, 60), lm.cache(2)
    lm.decode(x[:, :20], cache)
    lm.decode(x[:, 20:50], cache, lengths=torch.tensor([30, 0]))
    after = lm.decode(x[:, 50:], cache)
    whole = lm(torch.cat([x[1:, :20], x[1:, 50:]], 1)).logits
    torch.testing.assert_close(after[1], whole[0, 20:])


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    x, cache = text(3, 35), lm.cache(3, slack=4)
    lm.decode(x[:, :31], cache)
    lm.decode(x[:, 31:32], cache)
    cache.crop(torch.tensor([32, 29, 28]))
    cache.reorder(torch.tensor([2, 1]))
    cache.save(tmp_path / "cache")
    fork = Cache.load(tmp_path / "cache", lm).fork(2)
    for one, rows in ((cache, [2, 1]), (fork, [2, 2, 1, 1])):
        parts = [lm.decode(x[rows, 32:33], one), lm.decode(x[rows, 33:], one)]
        after = torch.cat([p for p in parts if p is not None], 1)
        for n, row in enumerate(rows):
            kept = x[row : row + 1, : {2: 28, 1: 29}[row]]
            whole = lm(torch.cat([kept, x[row : row + 1, 32:]], 1)).logits
            torch.testing.assert_close(after[n], whole[0, kept.shape[1] :])


def test_fork_leaves_its_origin_unchanged(lm: LM) -> None:
    x, cache = text(1, 30), lm.cache(1)
    lm.decode(x[:, :20], cache)
    lm.decode(text(1, 9, seed=5), cache.fork(1))
    torch.testing.assert_close(lm.decode(x[:, 20:], cache), lm(x).logits[:, 20:])


def test_crop_beyond_slack_changes_nothing() -> None:
    lm = make("hard(5)")
    x, cache = text(1, 12), lm.cache(1, slack=2)
    lm.decode(x, cache)
    with pytest.raises(ValueError, match=r"row 0 cannot be cropped by 6 tokens: at most 2 tokens can be taken back"):
        cache.crop(torch.tensor([6]))
    cache.crop(torch.tensor([11]))
    with pytest.raises(ValueError, match=r"and 1 are left"):
        cache.crop(torch.tensor([9]))
    assert cache.seen.tolist() == [11]


def test_a_state_can_be_continued_twice(lm: LM) -> None:
    x, more = text(4, 19), text(4, 7, seed=1)
    state = lm(x).state
    first, second = lm(more, state).logits, lm(more, state).logits
    torch.testing.assert_close(first, second)
    halves = [lm(more[some], state.rows(some)) for some in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(torch.cat([h.logits for h in halves]), first)
    joined = type(state).stack([h.state for h in halves])
    for name, t in lm(more, state).state.tensors().items():
        torch.testing.assert_close(joined.tensors()[name], t)


@pytest.mark.parametrize("kind, code", [("indexed(4, 16, index_dim=10)", 10), ("hard(16)", 0)])
def test_bytes_are_exact(kind: str, code: int) -> None:
    lm = make(kind)
    cache = lm.cache(2, slack=1)
    row = (16 + 1 + 1) * (2 * 3 * 8 * 8 + code * 8 + 2 * 8) + 2 * 8
    assert [part.bytes() for part in cache.parts()] == [2 * row] * 2
    lm.decode(text(2, 9), cache)
    held = [t for part in cache.parts() if isinstance(part, KeyRing) for t in part.tensors().values()]
    assert cache.bytes() == sum(t.numel() * t.element_size() for t in held) == 4 * row


def test_gradients_reach_every_used_parameter(lm: LM) -> None:
    x = text(2, 19)
    lm.train()
    found = lm(x, lm(text(2, 26, seed=1)).state, targets=x)
    assert found.nll is not None
    lm.learn_from(found.nll, torch.full_like(found.nll, 1 / found.nll.numel()))
    (found.nll.mean() + found.penalty).backward()
    for name, p in lm.named_parameters():
        assert p.requires_grad == (p.grad is not None), name
        assert p.grad is None or bool(torch.isfinite(p.grad).all()), name
