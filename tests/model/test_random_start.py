"""Texts that begin at random positions in training (`position.random_start`)."""

from __future__ import annotations

import pytest
import torch

from spanformer.memory import State
from spanformer.model.config import AttentionConfig, DepthConfig, EncoderConfig, ModelConfig, PositionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.position.absolute import SinusoidalPerLayer

POSITION = PositionConfig(kind="sinusoidal_per_layer", random_start=500)


def config(kind: str = "lm", position: PositionConfig = POSITION, **more: object) -> ModelConfig:
    half = {"encoder": EncoderConfig(attention=AttentionConfig(kind="full"), position=position)}
    return ModelConfig(
        vocab=17, dim=16, layers=3, heads=2, stack="universal", position=position, kind=kind,  # pyright: ignore
        attention=AttentionConfig(kind="full", max_span=40), **(half if kind == "seq2seq" else {}), **more,  # pyright: ignore
    )  # fmt: skip


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(15, shape, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list:
    """The positions that every layer is told."""
    told, embed = [], SinusoidalPerLayer.embed
    monkeypatch.setattr(SinusoidalPerLayer, "embed", lambda self, x, at: told.append(at) or embed(self, x, at))
    return told


def test_all_layers_and_segments_of_a_text_agree(starts: list) -> None:
    lm, x = LM(config()).double().train(), ids(3, 20)
    first = lm(x[:, :12])
    second = lm(x[:, 12:], first.state)
    assert len(starts) == 6 and all(torch.equal(at, starts[0]) for at in starts[:3])
    assert torch.equal(starts[3], starts[0][:, :1] + torch.arange(12, 20))
    assert len(set(starts[0][:, 0].tolist())) == 3 and bool((starts[0][:, 0] < 500).all())
    lm(x)
    assert not torch.equal(starts[6][:, :12], starts[0])  # another text, another start
    starts.clear()
    whole = lm(x, State(lm.start(3).layers, offset=first.state.offset))
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole.logits, atol=1e-9, rtol=1e-9)


def test_evaluation_and_decoding_begin_at_zero(starts: list) -> None:
    lm, x = LM(config()).double().eval(), ids(2, 9)
    whole = lm(x)
    assert starts == [0] * 3 and whole.state.offset is None
    cache = lm.cache(2)
    by_cache = torch.cat([lm.decode(piece, cache) for piece in x.split(1, 1)], 1)  # pyright: ignore
    torch.testing.assert_close(by_cache, whole.logits, atol=1e-9, rtol=1e-9)


def test_offsets_follow_rows_and_checkpoints() -> None:
    lm = LM(config()).train()
    state = lm(ids(4, 6)).state
    assert state.offset is not None
    picked = state.rows(torch.tensor([2, 0]))
    assert picked.offset is not None and picked.offset.tolist() == state.offset[[2, 0]].tolist()
    again = State.stack([state.rows(slice(0, 1)), state.rows(slice(1, 4))])
    assert again.offset is not None and torch.equal(again.offset, state.offset)
    loaded = lm.start(4).with_tensors(state.tensors(), state.seen)
    x = ids(4, 5)
    torch.testing.assert_close(lm(x, loaded).logits, lm(x, state).logits)


def test_encoder_and_both_halves_of_seq2seq_draw(starts: list) -> None:
    torch.manual_seed(1)
    Encoder(config("encoder")).train()(ids(2, 5))
    assert isinstance(starts[0], torch.Tensor) and starts[0].shape == (2, 5)
    starts.clear()
    model = Seq2Seq(config("seq2seq"))
    model.train()(ids(2, 5), ids(2, 7))
    assert [at.shape[1] for at in starts] == [5] * 3 + [7] * 3
    starts.clear()
    model.eval()(ids(2, 5), ids(2, 7))
    assert starts == [0] * 6


def test_ponder_and_random_starts_meet() -> None:
    lm = LM(config(depth=DepthConfig(kind="act"))).train()
    lm(ids(2, 8), targets=ids(2, 8)).nll.sum().backward()  # pyright: ignore
    assert lm.depth is not None and lm.depth.latest is not None


def test_relative_positions_refuse_it() -> None:
    wanted = (
        "model.position.random_start is 9, and rotary positions are distances, which do not depend on where a text "
        "begins; expected 0, or an absolute kind such as sinusoidal"
    )
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        PositionConfig(kind="rotary", random_start=9)
    with pytest.raises(ValueError, match=r"model\.position\.random_start is -1; expected at least 0"):
        PositionConfig(kind="sinusoidal", random_start=-1)
