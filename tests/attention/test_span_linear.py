"""Exact attention within a span and linear attention beyond it, against dense weights in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer import LM
from spanformer.attention import Full, LinearAttention, SpanLinear, View
from spanformer.attention.span_linear import Border
from spanformer.kinds import KINDS, HeadSpec
from spanformer.kinds.notation import parse_layer
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.ops import Attended, Rule
from support.reading import (
    by_segments,
    check_crop_reorder_fork_and_save,
    check_rows_of_different_lengths,
    from_cache,
    text,
)

HEADS, KV, D, RAMP, MAX = 4, 2, 8, 8.0, 40


def made(row: str, ratios: list[float] | None = None) -> SpanLinear:
    torch.manual_seed(1)
    (spec,) = parse_layer(row, HEADS)
    spec: HeadSpec = replace(spec, dim=HEADS * D, head_dim=D, kv_heads=KV)
    mechanism = KINDS["span_linear"].make()(spec).double()
    with torch.no_grad():
        for p in mechanism.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
        if ratios is not None:
            mechanism.border.ratio.copy_(torch.tensor(ratios))
    return mechanism


def drawn(tokens: int, batch: int = 2) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    sizes = {"q": (HEADS, tokens, D), "k": (KV, tokens, D), "v": (KV, tokens, D), "x": (tokens, HEADS * D)}
    return {
        name: torch.randn(batch, *size, generator=random, dtype=torch.float64).requires_grad_()
        for name, size in sizes.items()
    }


def dense(m: SpanLinear, t: dict[str, Tensor], hidden: Tensor) -> Attended:
    """hidden [B or 1, 1, T, T]"""
    k, v = (t[name].repeat_interleave(HEADS // KV, 1) for name in "kv")
    at = torch.arange(k.shape[2])
    distance = at[:, None] - at
    z = m.border.spans_of(t["x"])[..., None] if hasattr(m.border, "spans_of") else m.border._spans()[:, None, None]
    near = ((RAMP + z - distance) / RAMP).clamp(0, 1)
    exact = (t["q"] @ k.transpose(2, 3) / math.sqrt(D)).exp()
    linear = (F.elu(t["q"]) + 1) @ (F.elu(k) + 1).transpose(2, 3) * m.far_scale.exp()[:, None, None]
    weight = (near * exact + (1 - near) * linear).masked_fill(hidden, 0)
    return Attended(weight @ v / weight.sum(3, keepdim=True), weight.sum(3).log())


def later(tokens: int) -> Tensor:
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)


def everything(found: Attended, t: dict[str, Tensor], m: SpanLinear) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(9)
    loss = sum((p * torch.randn(p.shape, generator=random, dtype=torch.float64)).sum() for p in found)
    named = {name: p for name, p in {**t, **dict(m.named_parameters())}.items()}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)  # pyright: ignore
    made = {f"d_{name}": g for name, g in zip(named, grads, strict=True) if g is not None}
    return {"out": found.out.detach(), "lse": found.lse.detach()} | made


ROWS = {"span_linear(40, 8)": [0.31, -0.07, 0.99, 0.02], "span_linear(40, 8, dynamic=true)": None}


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 101])
@pytest.mark.parametrize("row", ROWS)
def test_equals_dense_weights_under_one_denominator(row: str, tokens: int) -> None:
    m, t = made(row, ROWS[row]), drawn(tokens)
    found = m(t["q"], t["k"], t["v"], m.rule(View(x=t["x"])), View(x=t["x"]))
    mine, true = everything(found, t, m), everything(dense(m, t, later(tokens)), t, m)
    assert mine.keys() == true.keys() and "d_far_scale" in mine
    for name in true:
        torch.testing.assert_close(mine[name], true[name], msg=lambda s, n=name: f"{n}: {s}")


@pytest.mark.parametrize("row", ROWS)
def test_padding_and_documents_hide_keys_from_both_parts(row: str) -> None:
    m, t = made(row, ROWS[row]), drawn(70)
    padding = torch.rand(2, 70, generator=torch.Generator().manual_seed(3)) < 0.2
    padding[:, 0] = False
    documents = torch.tensor([[0] * 20 + [1] * 50, [0] * 65 + [1] * 5])
    padding[:, 20] = padding[:, 65] = False  # each document has a token that is seen from its first on
    found = m(t["q"], t["k"], t["v"], m.rule(View(x=t["x"])), View(x=t["x"], padding=padding, documents=documents))
    hidden = later(70) | padding[:, None, None] | (documents[:, None, :, None] != documents[:, None, None])
    true = dense(m, t, hidden)
    torch.testing.assert_close(found.out, true.out)
    torch.testing.assert_close(found.lse, true.lse)


def test_longest_span_is_full_attention() -> None:
    m, t = made("span_linear(40, 8)", [1.0] * 4), drawn(39)
    found = m(t["q"], t["k"], t["v"], m.rule(View()), View())
    full = Full(HEADS)
    torch.testing.assert_close(found.out, full(t["q"], t["k"], t["v"], full.rule(), View()).out)


def test_shortest_span_is_linear_attention() -> None:
    m, t = made("span_linear(40, 8)", [-RAMP / MAX] * 4), drawn(70)
    found = m(t["q"], t["k"], t["v"], m.rule(View()), View())
    linear = LinearAttention(HEADS, D, KV)
    torch.testing.assert_close(found.out, linear(t["q"], t["k"], t["v"], Rule(HEADS), View()).out)


def test_span_shrinks_where_linear_weights_serve_and_grows_where_they_do_not() -> None:
    """With far weights equal to exact ones the span has no gradient but the penalty's."""
    border = Border(1, 40, ramp=RAMP, init=0.25)
    m = SpanLinear(border, D).double()
    with torch.no_grad():
        m.far_scale.fill_(-math.log(D))
    q = torch.full((1, 1, 60, D), 0.0, dtype=torch.float64)  # exp(s) is 1, and so is e^c φ·φ for c = −log D
    k, v = q.clone(), torch.randn(1, 1, 60, D, dtype=torch.float64)
    m(q, k, v, m.rule(View()), View()).out.square().sum().backward()
    assert border.ratio.grad is not None and border.ratio.grad.abs().max() < 1e-6
    with torch.no_grad():
        m.far_scale.sub_(3)
    border.ratio.grad = None
    m(q, k, v, m.rule(View()), View()).out.square().sum().backward()
    assert border.ratio.grad is not None and border.ratio.grad.abs().max() > 1e-3


def test_border_is_clamped_as_other_spans_and_may_be_set_below_zero() -> None:
    border = Border(2, 40, ramp=RAMP)
    with torch.no_grad():
        border.ratio.copy_(torch.tensor([-RAMP / 40, 3.0]))
    assert border.spans()[0] == pytest.approx(-RAMP) and border.context_length()[0] == 0
    border.after_step()
    assert border.spans() == pytest.approx([0.0, 40.0]) and border.context_length() == [7, 47]


# ---- models


@pytest.fixture(params=["span_linear", "span_linear(dynamic=true)", "2 window(5) + 4 span_linear"])
def lm(request: pytest.FixtureRequest) -> LM:
    torch.manual_seed(0)
    attention = AttentionConfig(kind=request.param, max_span=12, ramp=4, init=0.4, penalty=1e-3)
    position = PositionConfig(kind="rotary")
    config = ModelConfig(vocab=31, dim=48, layers=2, heads=6, kv_heads=3, position=position, attention=attention)
    model = LM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("border.ratio"):
                p.copy_(torch.rand(p.shape, generator=torch.Generator().manual_seed(4)))
            if "border.weight" in name:
                p.normal_()
    return model.double().eval()


@pytest.mark.parametrize("cuts", [[4, 9], [1, 2, 3], [20], [15, 40, 41]])
def test_segments_equal_one_pass(lm: LM, cuts: list[int]) -> None:
    x = text(2, 60)
    torch.testing.assert_close(by_segments(lm, x, cuts), lm(x).logits)


@pytest.mark.parametrize("sizes", [[60], [1] * 60, [3, 1, 36, 20]])
def test_cache_equals_one_pass(lm: LM, sizes: list[int]) -> None:
    x = text(2, 60)
    torch.testing.assert_close(from_cache(lm, x, sizes), lm(x).logits)


def test_cache_with_rows_of_different_lengths(lm: LM) -> None:
    check_rows_of_different_lengths(lm, [30, 4], 10)


def test_cache_is_cropped_reordered_forked_and_saved(lm: LM, tmp_path: Path) -> None:
    check_crop_reorder_fork_and_save(lm, tmp_path, [40], 5)


def test_documents_begin_with_an_empty_memory(lm: LM) -> None:
    x = text(1, 50)
    documents = torch.tensor([[0] * 18 + [1] * 32])
    torch.testing.assert_close(by_segments(lm, x, [25], documents), lm(x, documents=documents).logits)
    other = x.clone()
    other[:, :18] = (other[:, :18] + 5) % 31
    assert torch.equal(lm(x, documents=documents).logits[:, 18:], lm(other, documents=documents).logits[:, 18:])


def test_penalty_and_spans_reach_the_trainer(lm: LM) -> None:
    lm.train()
    found = lm(text(2, 30), targets=text(2, 30, seed=1))
    assert found.penalty is not None and found.nll is not None
    (found.nll.mean() + found.penalty).backward()
    border = [p for name, p in lm.named_parameters() if ".border." in name]
    assert border and all(p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in border)
    assert any(z is not None for m in lm.mechanisms() for z in m.spans())


def test_later_tokens_change_no_earlier_logit(lm: LM) -> None:
    x = text(1, 60)
    other = x.clone()
    other[:, 33:] = (other[:, 33:] + 7) % 31
    assert torch.equal(lm(x).logits[:, :33], lm(other).logits[:, :33])


def test_distance_tables_are_refused() -> None:
    attention = AttentionConfig(kind="span_linear", max_span=12)
    with pytest.raises(ValueError, match="SpanLinear does not support this position encoding: its state"):
        lm = LM(
            ModelConfig(vocab=9, dim=16, layers=1, heads=2, attention=attention, position=PositionConfig(kind="alibi"))
        )
        lm(text(1, 5) % 9)
