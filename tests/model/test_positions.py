"""Position encodings in a language model: one for all layers or one for each, where texts end, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.attention import Patterned
from spanformer.inspect.attention_maps import attention_maps
from spanformer.kinds import POSITIONS
from spanformer.model.build import make_position
from spanformer.model.config import EncoderConfig, PositionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from spanformer.position import Rotary
from support.small_models import KINDS, SMALL, make, position, text, with_attention


def model(kind: str) -> LM:
    return make(replace(SMALL, position=position(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_shared_or_one_for_each_layer(kind: str) -> None:
    lm = model(kind)
    positions = lm.positions()
    assert len(positions) == SMALL.layers
    assert len(set(map(id, positions))) == (SMALL.layers if POSITIONS[kind].per_layer else 1)
    names = {name for name, _ in lm.named_parameters() if name.startswith("position.")}
    assert all(name.split(".")[1].isdigit() == POSITIONS[kind].per_layer for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_training_step_reaches_every_parameter(kind: str) -> None:
    """In float32 as in float64, and what begins at zero does not stay there."""
    grads = []
    for dtype in (torch.float64, torch.float32):
        lm, x = model(kind).to(dtype).train(), text(2, 128)
        state = lm(x[:, :50]).state  # of memory, too
        out = lm(x[:, 50:127], state, targets=x[:, 51:])
        (out.nll.mean() + out.penalty).backward()
        grads.append({name: p.grad for name, p in lm.named_parameters() if name.startswith("position.")})
    for name, exact in grads[0].items():
        assert exact is not None and exact.abs().sum() > 0, name
        torch.testing.assert_close(grads[1][name].double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("kind", ["learned", "learned_per_layer"])
def test_text_beyond_the_table_is_refused(kind: str) -> None:
    lm, x = model(kind), text(1, 129)
    message = (
        "a token is at position 128 of its text, and learned positions end at 127; increase their length, start a new "
        "text, or use sinusoidal or relative positions$"
    )
    with pytest.raises(ValueError, match=message):
        lm(x)
    out = lm(x[:, :100])
    with pytest.raises(ValueError, match=message):
        lm(x[:, 100:], out.state)
    cache = lm.cache(1)
    lm.decode(x[:, :128], cache)
    with pytest.raises(ValueError, match=message):
        lm.decode(x[:, 128:], cache)


@pytest.mark.parametrize(
    "kind", ["sinusoidal", "sinusoidal_per_layer", "learned_per_layer", "learned", "transformer_xl", "shaw"]
)
def test_cache_rows_at_different_positions(kind: str) -> None:
    """Padding is not embedded, so it may stand where the table has ended."""
    lm, x = model(kind), text(2, 128)
    whole, cache = lm(x).logits, lm.cache(2)
    lm.decode(x[:, :120], cache, lengths=torch.tensor([120, 31]))
    more = torch.cat([torch.stack([x[0, 120:128], x[1, 31:39]]), text(2, 9)], 1)
    read = lm.decode(more, cache, lengths=torch.tensor([8, 8]))
    for got, expected in zip(read[:, :8], (whole[0, 120:], whole[1, 31:39]), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    step = lm.decode(x[:, 39:40], cache, lengths=torch.tensor([0, 1]))
    torch.testing.assert_close(step[1, 0], whole[1, 39], rtol=1e-9, atol=1e-9)


FOLDED = ("none", "table", "alibi", "distance_bias", "da_transformer")  # these read |d|


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_distinguishes_future_from_past(kind: str) -> None:
    """Read backwards, a text gives the same states backwards only to positions that do not tell the two apart. All
    backends agree on it."""
    config = replace(SMALL, kind="encoder", layers=2, position=position(kind))
    config = with_attention(config, kind="window(9)")
    torch.manual_seed(1)
    encoder, x = Encoder(config).double().eval(), text(2, 31)
    with torch.no_grad():
        for p in encoder.position.parameters():
            p.normal_()
        forwards, backwards = encoder(x).logits, encoder(x.flip(1)).logits.flip(1)
    assert torch.allclose(forwards, backwards, atol=1e-9) == (kind in FOLDED)
    for mechanism in encoder.mechanisms():
        mechanism.backend = "reference"
    torch.testing.assert_close(encoder(x).logits, forwards, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "pattern",
    ["Window(1, 5)", "Block(4, 0, 8)", "Window(3) | Global([7])", "blockwise(3, 4)", "image_1d(4, 3)", "fixed(5, 2)"],
)
def test_patterns_in_both_directions_work_with_every_position(pattern: str, kind: str) -> None:
    """What a pattern leaves of full attention, put to a sum of 1 again, is its own; all backends agree on it."""
    config = replace(SMALL, kind="encoder", layers=1, position=position(kind))
    whole, some = (with_attention(config, kind=name, max_span=64, stack=()) for name in ("full", pattern))
    torch.manual_seed(1)
    encoder, x = Encoder(some).double().eval(), text(1, 31)
    everything = Encoder(whole).double().eval()
    with torch.no_grad():
        for p in encoder.positions()[0].parameters():
            p.normal_()
        everything.load_state_dict(encoder.state_dict())
        (dense,), (found,) = attention_maps(everything, x[0]), attention_maps(encoder, x[0])
        mechanism, at = encoder.mechanisms()[0], torch.arange(31)
        assert isinstance(mechanism, Patterned)
        seen = torch.stack([p.visible(at[:, None], at[None], causal=False) for p in mechanism.patterns])
        left = dense * seen.expand_as(dense)
        total = left.sum(-1, keepdim=True)
        left = left / torch.where(total == 0, 1, total)  # a row that sees nothing is zeros
        torch.testing.assert_close(found, left, rtol=1e-9, atol=1e-12)
        logits = []
        for backend in ("reference", "banded"):
            mechanism.backend = backend
            logits.append(encoder(x).logits)
        mechanism.backend = "auto"
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(encoder.float()(x).logits.double(), logits[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_decoder_decodes_as_teacher_forced(kind: str) -> None:
    half = EncoderConfig(position=position(kind), attention=SMALL.attention)
    torch.manual_seed(1)
    model = Seq2Seq(replace(SMALL, kind="seq2seq", layers=2, position=position(kind), encoder=half)).double().eval()
    source, x = text(2, 17), text(2, 12)
    cache = model.start(source)
    read = torch.cat([model.decode(piece, cache) for piece in x.split([5, *[1] * 7], 1)], 1)
    torch.testing.assert_close(read, model(source, x).logits, rtol=1e-9, atol=1e-9)


def test_scaled_rotary_reaches_the_model() -> None:
    config = PositionConfig(scaling="yarn", factor=4.0, length=64)
    made = make_position(replace(SMALL, position=config))
    assert isinstance(made, Rotary) and (made.scaling, made.factor, made.trained) == ("yarn", 4.0, 64)
    lm, x = make(replace(SMALL, position=config)), text(1, 100)
    cache = lm.cache(1)
    found = torch.cat([lm.decode(piece, cache) for piece in x.split([60] + [1] * 40, 1)], 1)
    torch.testing.assert_close(found, lm(x).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "learned"}, "model.position.length is 0; learned needs a number of tokens"),
        (
            {"scaling": "yarn", "factor": 2.0},
            "model.position.length is 0; rotary needs the length that the model was trained on",
        ),
        (
            {"kind": "alibi", "scaling": "ntk"},
            "model.position.scaling is 'ntk', which is for rotary positions; position.kind is 'alibi', so set scaling "
            "to 'none'",
        ),
        ({"factor": 2.0}, "model.position.factor is 2.0 without a scaling; set position.scaling, or leave factor at 1"),
        ({"scaling": "ntk", "factor": 0.5}, "model.position.factor is 0.5; expected at least 1"),
        ({"clip": 0}, "model.position.clip is 0; expected at least 1"),
        ({"length": -1}, "model.position.length is -1; expected at least 0"),
    ],
)
def test_position_config_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        PositionConfig(**options)
