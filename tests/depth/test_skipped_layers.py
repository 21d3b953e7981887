"""A layer that no token reaches: it stores keys and values and reads nothing, and the text stays the same."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from spanformer.depth import Exits
from spanformer.depth.exits import ExitRun
from spanformer.memory import HeadCache, HiddenStates
from spanformer.model.block import Block
from spanformer.model.config import AttentionConfig, DepthConfig, ModelConfig, PositionConfig
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq

LAYERS = 4
KINDS = ["full", "adaptive_span", "dynamic_span", "sink_window(6)", "expire_span", "forgetting", "big_bird(4, 3, 1, 1)",
         "linear", "2 window(5) + 2 linear"]  # fmt: skip


def make(kind: str = "full", position: str = "rotary", **settings: object) -> tuple[LM, Exits]:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab=23, dim=32, layers=LAYERS, heads=4, attention=AttentionConfig(kind=kind, max_span=24, ramp=4, init=0.5),
        position=PositionConfig(kind=position), depth=DepthConfig(kind="exits"), **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    lm = LM(config).double().eval()
    assert isinstance(lm.depth, Exits)
    return lm, lm.depth


def ids(*shape: int) -> Tensor:
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that read keys, and the feed-forwards that ran."""
    found: list[str] = []

    def watch(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(*args, **kwargs):
            found.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((HeadCache, "read"), (HeadCache, "read_placed"), (HiddenStates, "_group"), (Block, "feed")):
        watch(owner, name)
    return found


def test_decoding_reads_no_keys_in_skipped_layers(reads: list[str]) -> None:
    lm, exits = make()
    for fixed in (1, 3, LAYERS):
        exits.fixed, cache = fixed, lm.cache(2)
        lm.decode(ids(2, 5), cache)
        reads.clear()
        lm.decode(ids(2, 1), cache)
        assert sorted(reads) == ["feed"] * fixed + ["read"] * fixed


def test_segments_read_no_keys_in_skipped_layers(reads: list[str]) -> None:
    lm, exits = make()
    exits.fixed = 2
    lm(ids(2, 9))
    assert sorted(reads) == ["_group"] * 2 + ["feed"] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_layers_store_what_deeper_tokens_read(kind: str) -> None:
    """Tokens that leave early, then tokens that go to the end and attend to them."""
    lm, exits = make(kind, "none" if "linear" in kind else "alibi" if "big" not in kind else "rotary")
    x = ids(2, 31)
    with torch.no_grad():
        exits.fixed = 1
        first = lm(x[:, :20])
        exits.fixed = None
        whole = lm(x[:, 20:], first.state).logits
        exits.fixed, cache = 1, lm.cache(2)
        lm.decode(x[:, :3], cache)
        for piece in x[:, 3:20].split(1, 1):
            lm.decode(piece, cache)
        exits.fixed = None
        decoded = torch.cat([lm.decode(piece, cache) for piece in x[:, 20:].split(1, 1)], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(decoded, whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "lsh(8, 4, 2)", "routing(8, 4)", "hard"])
def test_skipped_work_equals_computing_all_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mechanism must not read the queries that a layer skips, as keys either."""
    lm, exits = make(kind, "none")
    leave = torch.randint(LAYERS, (2 * 31,), generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(ExitRun, "_ends", lambda self, layer, *_: leave[self.index] <= layer)
    with torch.no_grad():
        skipped = lm(ids(2, 31)).logits
        assert exits.latest is not None and torch.equal(exits.latest.flatten(), leave + 1)
        monkeypatch.setattr(ExitRun, "active", lambda self: None)
        torch.testing.assert_close(lm(ids(2, 31)).logits, skipped, atol=1e-9, rtol=1e-9)


def test_rows_at_different_positions_store_their_own(reads: list[str]) -> None:
    lm, exits = make()
    x, lengths = ids(3, 12), torch.tensor([12, 7, 1])
    exits.fixed = 2
    with torch.no_grad():
        cache = lm.cache(3)
        lm.decode(x, cache, lengths=lengths)
        more = torch.cat([lm.decode(piece, cache) for piece in ids(3, 4).split(1, 1)], 1)  # type: ignore[arg-type]
        for row, n in enumerate(lengths.tolist()):
            alone = lm(torch.cat([x[row : row + 1, :n], ids(3, 4)[row : row + 1]], 1)).logits
            torch.testing.assert_close(more[row], alone[0, -4:], atol=1e-9, rtol=1e-9)  # type: ignore[index]


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("position", ["rotary", "alibi", "sinusoidal_per_layer"])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_all_skipped_layers_at_once_equal_one_by_one(
    norm: Literal["rms", "layer"], position: str, kv_heads: int, bits: Literal[0, 8, 4], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, exits = make("window(9)", position, norm=norm, kv_heads=kv_heads)
    for block in lm.ordered_blocks():
        torch.nn.init.uniform_(block.norm1.weight, 0.5, 2)  # type: ignore[arg-type]
    exits.fixed, exits.lazy, at_once = 2, False, []
    real = LM.skip_from
    monkeypatch.setattr(LM, "skip_from", lambda *args: at_once.append(real(*args)) or at_once[-1])

    def caches() -> dict[str, Tensor]:
        cache = lm.cache(3, bits=bits)
        lm.decode(ids(3, 12), cache, lengths=torch.tensor([12, 7, 1]))
        for piece in ids(3, 3).split(1, 1):
            lm.decode(piece, cache)
        return {f"{n}.{name}": t for n, ring in enumerate(cache.rings()) for name, t in ring.store.tensors().items()}

    found = caches()
    assert set(at_once) == {norm == "rms" and position != "sinusoidal_per_layer"}
    monkeypatch.setattr(LM, "skip_from", lambda *_: False)
    for name, t in caches().items():
        torch.testing.assert_close(found[name], t, atol=0 if t.dtype == torch.int8 else 1e-6, rtol=1e-6)


@torch.no_grad()
def turn(block: Block) -> None:
    block.attention.key.weight.mul_(-3)


def test_stacked_matrix_follows_the_weights() -> None:
    lm, exits = make()
    x = ids(1, 4)
    for change in (lambda: None, lambda: turn(lm.ordered_blocks()[2]), lambda: lm.float()):
        change()
        exits.fixed, cache = 1, lm.cache(1)
        lm.decode(x, cache)
        exits.fixed = None
        with torch.no_grad():
            exits.fixed = 1
            first = lm(x)
            exits.fixed = None
            want = lm(x, first.state).logits
        torch.testing.assert_close(lm.decode(x, cache), want, atol=1e-4, rtol=1e-4)


def test_span_penalty_does_not_depend_on_exits() -> None:
    lm, exits = make("adaptive_span", "sinusoidal")
    full = lm(ids(1, 8)).penalty
    exits.fixed = 1
    torch.testing.assert_close(lm(ids(1, 8)).penalty, full)


def test_halted_targets_skip_cross_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        kind="seq2seq", vocab=23, dim=32, layers=LAYERS, heads=4, stack="universal",
        position=PositionConfig(kind="sinusoidal_per_layer"), depth=DepthConfig(kind="act", bias=20.0),
    )  # fmt: skip
    model, real = Seq2Seq(config).eval(), Block.cross_attend
    calls: list[bool] = []

    def watched(self: Block, *args):
        calls.append(self.cross is not None)
        return real(self, *args)

    monkeypatch.setattr(Block, "cross_attend", watched)
    model(ids(1, 6), ids(1, 4))
    assert calls.count(True) == 1  # bias 20: every token halts after one step
