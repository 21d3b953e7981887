"""Lazy propagation: a skipped layer projects a token's keys and values only if a later token within its reach goes that
deep. Texts, states and counts equal those of storing everything at once, less what nobody reads."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from spanformer.depth.exits import ExitRun
from spanformer.memory import Cache
from spanformer.memory.deferred import Deferred, Projected
from spanformer.model.config import AttentionConfig, DepthConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM

LAYERS = 4


def make(kind: str = "full", position: str = "rotary", *, lazy: bool = True, **settings: object) -> LM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=23, dim=32, layers=LAYERS, heads=4, attention=AttentionConfig(kind=kind, max_span=12, ramp=4, init=0.5),
        position=PositionConfig(kind=position), depth=DepthConfig(kind="exits"), **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    lm = LM(config).double().eval()
    lm.exits().lazy = lazy
    return lm


def ids(*shape: int) -> Tensor:
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(1))


def depths(*shape: int) -> Tensor:
    """Layers of each token: most leave early."""
    return torch.randint(1, 2 * LAYERS, shape, generator=torch.Generator().manual_seed(2)) % LAYERS + 1


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Its last element [B, T] says after how many layers the tokens of a pass leave."""
    pattern: list[Tensor] = []
    monkeypatch.setattr(
        ExitRun, "_ends", lambda self, layer, *_: pattern[-1].flatten()[self.index] <= layer + 1
    )  # fmt: skip
    return pattern


def decode(lm: LM, x: Tensor, taken: Tensor, cache: Cache, leave: list[Tensor], first: int = 1) -> Tensor:
    """The logits of x [B, T]: of the first tokens in one pass, then token by token."""
    found, start = [], 0
    for size in [first] + [1] * (x.shape[1] - first):
        leave.append(taken[:, start : start + size])
        found.append(lm.decode(x[:, start : start + size], cache))
        start += size
    return torch.cat(found, 1)


def waiting(cache: Cache) -> Deferred:
    assert cache.deferred is not None
    return cache.deferred


def stored(cache: Cache) -> dict[str, Tensor]:
    """Everything that the rings hold, after what waits was stored."""
    if cache.deferred is not None:
        cache.deferred.settle()
    return {f"{n}.{name}": t for n, ring in enumerate(cache.rings()) for name, t in ring.store.tensors().items()}


def assert_same(found: Cache, want: Cache) -> None:
    assert torch.equal(found.place, want.place)
    mine, theirs = stored(found), stored(want)
    for name, t in theirs.items():
        torch.testing.assert_close(mine[name], t, atol=0 if t.dtype == torch.int8 else 1e-9, rtol=1e-6)


def pair(leave: list[Tensor], kind: str = "window(5)", rows: int = 2, tokens: int = 21) -> tuple[Cache, Cache]:
    """KV caches of the same text, lazy and not."""
    found = []
    for lazy in (True, False):
        lm = make(kind, lazy=lazy)
        cache = lm.cache(rows, slack=4)
        decode(lm, ids(rows, tokens), depths(rows, tokens), cache, leave)
        found.append(cache)
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["full", "window(5)", "sink_window(6)", "adaptive_span", "dynamic_span"])
@pytest.mark.parametrize("position", ["rotary", "alibi"])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_lazy_propagation_equals_storing_at_once(
    kind: str, position: str, bits: Literal[0, 8, 4], leave: list[Tensor]
) -> None:
    x, taken, found = ids(3, 40), depths(3, 40), []
    for lazy in (True, False):
        lm = make(kind, position, lazy=lazy, kv_heads=2)
        cache = lm.cache(3, bits=bits)
        assert (cache.deferred is not None) == lazy
        found.append((decode(lm, x, taken, cache, leave, first=7), cache))
    (lazily, cache), (at_once, eager) = found
    torch.testing.assert_close(lazily, at_once, atol=1e-9, rtol=1e-9)
    assert 0 < waiting(cache).counts.flushed < waiting(cache).counts.deferred
    assert_same(cache, eager)


def test_lazy_propagation_with_layer_norm(leave: list[Tensor]) -> None:
    x, taken = ids(2, 20), depths(2, 20)
    models = [make(lazy=lazy, norm="layer") for lazy in (True, False)]
    lazily, at_once = (decode(lm, x, taken, lm.cache(2), leave) for lm in models)
    torch.testing.assert_close(lazily, at_once, atol=1e-9, rtol=1e-9)


def test_rows_do_not_influence_each_other(leave: list[Tensor]) -> None:
    lm, x, taken = make("window(5)"), ids(3, 25), depths(3, 25)
    cache = lm.cache(3)
    together = decode(lm, x, taken, cache, leave)
    alone, total = [], Projected(0, 0)
    for row in range(3):
        some = lm.cache(1)
        alone.append(decode(lm, x[row : row + 1], taken[row : row + 1], some, leave))
        counts = waiting(some).counts
        total = Projected(total.deferred + counts.deferred, total.flushed + counts.flushed)
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-9, rtol=1e-9)
    assert waiting(cache).counts == total


def test_counts_of_a_pattern_by_hand(leave: list[Tensor]) -> None:
    lm = make("window(3)")  # each head sees a token and 2 earlier ones
    taken, cache = torch.tensor([[1, 1, 1, 1, 4, 1, 4]]), lm.cache(1)
    assert cache.rings()[0].reach == [3] * 4
    decode(lm, ids(1, 7), taken, cache, leave)
    # 5 tokens skip 3 layers. The fifth token reads the two before it, the last one reads the sixth, in 3 layers each.
    assert waiting(cache).counts == Projected(deferred=15, flushed=9)
    assert waiting(cache).counts.saved == 6


def test_products_that_nobody_needs_are_not_computed(leave: list[Tensor]) -> None:
    lm, taken = make("window(5)"), depths(3, 25)
    seen: list[int] = []

    def count(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
        seen.append(inputs[0].shape[:-1].numel())

    for block in lm.ordered_blocks():
        block.attention.value.register_forward_hook(count)
    cache = lm.cache(3)
    decode(lm, ids(3, 25), taken, cache, leave)
    counts = waiting(cache).counts
    assert counts.deferred == int((LAYERS - taken).sum())
    assert sum(seen) == taken.numel() * LAYERS - counts.saved


def test_crop_forgets_what_waits(leave: list[Tensor]) -> None:
    lazily, at_once = pair(leave)
    x, taken = ids(2, 9), depths(2, 9).flip(1)
    for back in (3, 4):
        found = []
        for cache in (lazily, at_once):
            cache.crop(cache.seen - back)
            found.append(decode(cache.maker, x, taken, cache, leave))  # type: ignore[arg-type]
        torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)


def test_slot_that_was_stored_waits_with_its_new_token(leave: list[Tensor]) -> None:
    x, found = ids(2, 3), []
    for lazy in (True, False):
        lm = make(lazy=lazy)
        cache = lm.cache(1, slack=2)
        for text in x[:, None]:  # each time the last token, which runs all layers, stores the two before it
            cache.crop(torch.zeros(1, dtype=torch.int64))
            latest = decode(lm, text, torch.tensor([[1, 1, LAYERS]]), cache, leave)
        found.append(latest)
    torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)


def test_copied_rows_wait_on_their_own(leave: list[Tensor]) -> None:
    lazily, at_once = pair(leave)
    forks = [cache.fork(2) for cache in (lazily, at_once)]
    for cache in (lazily, at_once):
        cache.reorder(torch.tensor([1, 1, 0]))
    for mine, theirs in ((lazily, at_once), forks):
        b = mine.batch
        x, taken = ids(b, 6), depths(b, 6)
        found = [decode(cache.maker, x, taken, cache, leave) for cache in (mine, theirs)]  # type: ignore[arg-type]
        torch.testing.assert_close(*found, atol=1e-9, rtol=1e-9)
        assert_same(mine, theirs)


def test_saved_cache_holds_what_waited(leave: list[Tensor], tmp_path: Path) -> None:
    lazily, at_once = pair(leave)
    lazily.save(tmp_path / "cache")
    lm = lazily.maker
    assert isinstance(lm, LM)
    assert_same(Cache.load(tmp_path / "cache", lm), at_once)


@pytest.mark.parametrize("longer", [-2, 3])
def test_changed_spans_store_what_waits(longer: int, leave: list[Tensor]) -> None:
    lazily, at_once = pair(leave)
    for cache in (lazily, at_once):
        cache.resize([[n + longer for n in ring.reach] for ring in cache.rings()])
    assert not waiting(lazily).pending.any()
    assert_same(lazily, at_once)


def test_rows_of_different_lengths_defer_their_own(leave: list[Tensor]) -> None:
    lengths, found = torch.tensor([12, 7, 1]), []
    for lazy in (True, False):
        lm = make("window(5)", lazy=lazy)
        cache = lm.cache(3)
        leave.append(torch.tensor([1, 2, 1])[:, None].expand(3, 12))
        lm.decode(ids(3, 12), cache, lengths=lengths)
        if lazy:
            assert waiting(cache).counts.deferred == 12 * 3 + 7 * 2 + 3
        found.append((decode(lm, ids(3, 9), depths(3, 9), cache, leave), cache))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-9, rtol=1e-9)
    assert_same(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ["forgetting", "linear", "2 window(5) + 2 linear"])
def test_memories_that_are_not_rings_store_at_once(kind: str) -> None:
    assert make(kind, "none").cache(1).deferred is None
