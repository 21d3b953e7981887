"""Heads that see their buckets, in language models: by segments, from a KV cache, and beside windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanformer import LM
from spanformer.memory.buckets import Buckets
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from support.reading import (
    by_segments,
    check_crop_reorder_fork_and_save,
    check_rows_and_stack_of_states,
    check_rows_of_different_lengths,
    from_cache,
    text,
)

KINDS = (
    "lsh(5, 4, 3)", "lsh(3, 6, 1)", "lsh(6, 4, 2, learned=true)", "2 window(5) + 4 lsh(4, 4, 2)", "lsh(64, 2, 2)",
    "routing(5, 4)", "3 window(6) + 3 routing(3, 2)",
)  # fmt: skip


@pytest.fixture(params=KINDS)
def lm(request: pytest.FixtureRequest) -> LM:
    return make(request.param)


def make(kind: str, kv_heads: int = 6) -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=kind, ramp=4.0, init=0.3, max_span=64)
    position = PositionConfig(kind="sinusoidal")
    config = ModelConfig(
        vocab=31, dim=48, layers=2, heads=6, kv_heads=kv_heads, position=position, attention=attention
    )  # fmt: skip
    return LM(config).double().eval()


@pytest.mark.parametrize("cuts", [[4, 9], [1, 2, 3], [30], [10, 20]])
def test_segments_equal_one_pass(lm: LM, cuts: list[int]) -> None:
    x = text(2, 37)
    torch.testing.assert_close(by_segments(lm, x, cuts), lm(x).logits)


def test_segments_with_documents_equal_one_pass(lm: LM) -> None:
    x, documents = text(2, 37), (torch.arange(37) // 11).expand(2, 37)
    whole = lm(x, documents=documents).logits
    torch.testing.assert_close(by_segments(lm, x, [9, 10, 25], documents), whole)
    alone = LM.forward(lm, x[:, 11:22]).logits if lm.config.position.kind == "none" else None
    assert alone is None or torch.allclose(whole[:, 11:22], alone)


@pytest.mark.parametrize("sizes", [[37], [1] * 37, [3, 1, 8, 25]])
def test_cache_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x = text(2, 37)
    torch.testing.assert_close(from_cache(lm, x, sizes), lm(x).logits)


def test_grouped_values() -> None:
    lm = make("lsh(5, 4, 2)", kv_heads=2)
    x = text(2, 30)
    torch.testing.assert_close(from_cache(lm, x, [12, 1, 1, 16]), lm(x).logits)


def test_cache_with_rows_of_different_lengths(lm: LM) -> None:
    check_rows_of_different_lengths(lm, [19, 8], 5, slack=3, back=[2, 1])


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    check_crop_reorder_fork_and_save(lm, tmp_path, [31, 1], 3)


def test_fork_leaves_its_origin_unchanged(lm: LM) -> None:
    x, cache = text(1, 30), lm.cache(1)
    lm.decode(x[:, :20], cache)
    lm.decode(text(1, 9, seed=5), cache.fork(1))
    torch.testing.assert_close(lm.decode(x[:, 20:], cache), lm(x).logits[:, 20:])


def test_crop_beyond_slack_changes_nothing() -> None:
    lm = make("lsh(5, 4, 3)")
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
    check_rows_and_stack_of_states(lm, 19, 7)


def test_bytes_are_exact() -> None:
    lm = make("lsh(5, 4, 3)")
    cache = lm.cache(2, slack=1)
    slots, rounds, d = 4 * 6 + 1, 3, 8
    row = 6 * rounds * (slots * (2 * d * 8 + (rounds + 1) * 8) + 4 * 8) + 6 * rounds * 8 + 8
    assert [part.bytes() for part in cache.parts()] == [2 * row] * 2
    lm.decode(text(2, 9), cache)
    held = [t for part in cache.parts() if isinstance(part, Buckets) for t in part.tensors().values()]
    assert cache.bytes() == sum(t.numel() * t.element_size() for t in held) == 4 * row


def test_gradients_reach_every_used_parameter(lm: LM) -> None:
    x = text(2, 19)
    found = lm(x, lm(text(2, 26, seed=1)).state, targets=x)
    assert found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    for name, p in lm.named_parameters():
        assert p.requires_grad == (p.grad is not None), name
        assert p.grad is None or bool(torch.isfinite(p.grad).all()), name


@pytest.mark.parametrize("kind", [*KINDS, "6 window(256) + 2 lsh(64, 32, 2)"])
def test_native_decoding_equals_pytorch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = 8 if kind.startswith("6 window") else 6
    attention, position = AttentionConfig(kind=kind, ramp=4.0, init=0.3, max_span=64), PositionConfig(kind="sinusoidal")
    torch.manual_seed(0)
    config = ModelConfig(vocab=31, dim=8 * heads, layers=2, heads=heads, position=position, attention=attention)
    lm, x = LM(config).eval(), text(2, 37)
    native = from_cache(lm, x, [9] + [1] * 28)
    monkeypatch.setattr("spanformer.memory.buckets.served", lambda *_: False)
    torch.testing.assert_close(native, from_cache(lm, x, [9] + [1] * 28), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(native, lm(x).logits, rtol=1e-4, atol=1e-5)
