"""Queries scaled by the logarithm of their position, against the equation in float64, and in a language model."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch

from spanformer import LM, Rule, attend
from spanformer.attention import View
from spanformer.model.config import AttentionConfig, EncoderConfig, ModelConfig, PositionConfig
from spanformer.position import Alibi, LogScaled, Position, Rotary, Shaw
from spanformer.rl.config import RLConfig
from support.reading import by_segments, check_rows_of_different_lengths, from_cache, text

KINDS = ("none", "rotary", "shaw", "alibi", "learned")


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
    """softmax(q·k / √D · ln(i + 2) / ln(length)), causal; queries are the last of the keys."""
    tq, tk = q.shape[2], k.shape[2]
    at = torch.arange(tk - tq, tk)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    scores = scores * ((at + 2).log() / math.log(length))[:, None]
    return scores.masked_fill(torch.arange(tk) > at[:, None], -math.inf).softmax(-1) @ v


@pytest.mark.parametrize(("tq", "tk"), [(1, 1), (1, 33), (7, 7), (5, 18)])
def test_values_and_gradients_equal_the_equation(tq: int, tk: int) -> None:
    g = torch.Generator().manual_seed(tk)
    q, k, v = (torch.randn(2, 3, n, 8, generator=g, dtype=torch.float64, requires_grad=True) for n in (tq, tk, tk))
    found = attend(*LogScaled(Position(), 16).encode(q, k, View()), v, Rule(3)).out
    expected, weight = dense(q, k, v, 16), torch.randn(found.shape, generator=g, dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    for got, want in zip(*(torch.autograd.grad(out, (q, k, v), weight) for out in (found, expected)), strict=True):
        torch.testing.assert_close(got, want)


def test_positions_are_given_or_follow_from_the_first_key() -> None:
    scaled, q = LogScaled(Position(), 10), torch.ones(2, 1, 2, 4, dtype=torch.float64)
    at = torch.tensor([[0, 8], [98, 3]])
    given, _ = scaled.encode(q, q, View(q_positions=at, k_positions=at))
    torch.testing.assert_close(given[:, 0, :, 0], (at + 2).double().log() / math.log(10))
    later, _ = scaled.encode(q, q, View(start=97))
    torch.testing.assert_close(later[0, 0, :, 0], torch.tensor([99.0, 100.0]).double().log() / math.log(10))
    assert float(scaled.factor(torch.tensor([8]))) == pytest.approx(1)


def test_inner_encoding_stays_in_front() -> None:
    q, k, at = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.arange(3, 8)
    rotary, scaled = Rotary(8), LogScaled(Rotary(8), 64)
    plain, encoded = (p.encode_at(lambda: at, torch.float32) for p in (rotary, scaled))
    assert plain is not None and encoded is not None
    (q1, k1), (q2, k2) = plain(q, k), encoded(q, k)
    torch.testing.assert_close(q2, q1 * scaled.factor(at).float())
    torch.testing.assert_close(k2, k1, rtol=0, atol=0)
    given = View(q_positions=at, k_positions=at)
    torch.testing.assert_close(scaled.encode_for([1])(q[:, 1:], k, given)[0], q2[:, 1:])
    assert LogScaled(Shaw(2, 8, 2), 64).rule(View(), 4) is not None and LogScaled(Alibi(2), 64).adds_rule
    assert LogScaled(Position(), 64).rule(View(), 4) is None


def model(kind: str, attention: str, **changes: object) -> LM:
    config = ModelConfig(
        vocab=31, dim=32, layers=2, heads=4, attention=AttentionConfig(kind=attention, max_span=24, ramp=8, init=0.5),
        position=PositionConfig(kind=kind, length=64 if kind == "learned" else 0, clip=3, log_scale=12),
    )  # fmt: skip
    torch.manual_seed(0)
    return LM(replace(config, **changes)).double().eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["full", "adaptive_span", "2 window(5) + 2 dynamic_span"])
def test_segments_and_kv_cache_equal_one_pass(kind: str, attention: str) -> None:
    lm, x = model(kind, attention), text(2, 60)
    with torch.no_grad():
        whole = lm(x).logits
        torch.testing.assert_close(by_segments(lm, x, [1, 9, 37]), whole)
        torch.testing.assert_close(from_cache(lm, x, [20, *[1] * 10, 30]), whole)
        check_rows_of_different_lengths(lm, [3, 17, 8], 4)


def test_universal_stack_with_exits() -> None:
    lm, x = model("shaw", "full", stack="universal"), text(1, 30)
    with torch.no_grad():
        torch.testing.assert_close(from_cache(lm, x, [10, *[1] * 20]), lm(x).logits)


def test_scale_changes_the_model() -> None:
    with torch.no_grad():
        scaled, x = model("rotary", "full"), text(1, 30)
        plain = LM(replace(scaled.config, position=replace(scaled.config.position, log_scale=0))).double().eval()
        plain.load_state_dict(
            {name.replace("position.inner.", "position."): t for name, t in scaled.state_dict().items()}
        )
        assert (plain(x).logits - scaled(x).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LogScaled(Position(), 1), "length is 1; expected at least 2 tokens"),
        (lambda: PositionConfig(log_scale=1), "position.log_scale is 1; expected "),
        (
            lambda: ModelConfig(kind="encoder", position=PositionConfig(log_scale=64)),
            "model.position.log_scale is 64, which counts the tokens before a query, and model.kind is 'encoder'; "
            "expected 0, or kind 'lm'",
        ),
        (
            lambda: ModelConfig(kind="seq2seq", encoder=EncoderConfig(), position=PositionConfig(log_scale=64)),
            "model.position.log_scale is 64, which counts the tokens before a query, and model.kind is 'seq2seq'",
        ),
        (
            lambda: RLConfig(model=ModelConfig(position=PositionConfig(log_scale=64))),
            "model.position.log_scale is 64; expected 0, since episodes begin anywhere in a policy's memory",
        ),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
