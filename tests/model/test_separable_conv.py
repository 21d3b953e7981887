"""The feed-forward with a convolution: its equation, what it must not see, segments and decoding, halted tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanformer.attention import View
from spanformer.memory import ByHead, HeadPart, MemoryShape
from spanformer.memory.inputs import Inputs
from spanformer.model.config import (
    AttentionConfig,
    DepthConfig,
    EncoderConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
)
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.separable_conv import SeparableConv
from spanformer.model.seq2seq import Seq2Seq

F64 = torch.float64


def by_hand(conv: SeparableConv, x: Tensor, documents: Tensor | None = None) -> Tensor:
    """x [T, dim], one text without padding; a loop over tokens and taps."""
    ahead, rows = 0 if conv.causal else conv.kernel // 2, []
    for t in range(len(x)):
        c = torch.zeros(x.shape[1], dtype=x.dtype)
        for tap in range(conv.kernel):
            at = t + ahead - (conv.kernel - 1 - tap)
            if 0 <= at < len(x) and (documents is None or documents[at] == documents[t]):
                c = c + conv.weight[:, 0, tap] * x[at]
        inner = conv.feed.up.weight @ c
        rows.append(conv.feed.down.weight @ (inner * (inner > 0)))
    return torch.stack(rows)


def memory(conv: SeparableConv, batch: int) -> ByHead:
    shape = MemoryShape(batch, 1, 4, dtype=F64)
    return ByHead([HeadPart(None, Inputs.start(conv.kernel - 1 if conv.causal else 0, conv.dim, shape))])


def made(kernel: int, causal: bool) -> SeparableConv:
    torch.manual_seed(kernel)
    return SeparableConv(5, 7, kernel, causal=causal, bias=False, dropout=0.0).double()


@pytest.mark.parametrize(("kernel", "causal"), [(1, True), (2, True), (3, True), (6, True), (3, False), (5, False)])
def test_values_and_gradients_equal_the_equation(kernel: int, causal: bool) -> None:
    conv, x = made(kernel, causal), torch.randn(2, 4, 5, dtype=F64, requires_grad=True)
    y, loss = conv(x, memory(conv, 2), View())
    want = torch.stack([by_hand(conv, row) for row in x])
    assert loss is None and y.shape == x.shape
    torch.testing.assert_close(y, want)
    weight, inputs = torch.randn_like(y), [x, *conv.parameters()]
    assert len(inputs) == 4
    for a, b in zip(torch.autograd.grad(y, inputs, weight), torch.autograd.grad(want, inputs, weight), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_passed_over_and_documents_end_it(causal: bool) -> None:
    conv, x = made(3, causal), torch.randn(2, 8, 5, dtype=F64)
    padding = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 1], [0] * 8]).bool()
    documents = torch.tensor([[4, 4, 4, 4, 4, 7, 7, 7], [1, 1, 1, 2, 2, 2, 2, 2]])
    y, _ = conv(
        x.masked_fill(padding[..., None], math.nan), memory(conv, 2), View(padding=padding, documents=documents)
    )
    for row in range(2):
        real = ~padding[row]
        torch.testing.assert_close(y[row, real], by_hand(conv, x[row, real], documents[row, real]))


def test_only_active_tokens_are_computed() -> None:
    conv, x, active = made(3, True), torch.randn(2, 6, 5, dtype=F64), torch.tensor([0, 3, 4, 11])
    y, _ = conv(x, memory(conv, 2), View(active=active))
    whole, _ = conv(x, memory(conv, 2), View())
    torch.testing.assert_close(y, whole.flatten(0, 1)[active])
    nobody, _ = conv(x, memory(conv, 2), View(active=active[:0]))
    assert nobody.shape == (0, 5)


def config(kind: str = "lm", **more: object) -> ModelConfig:
    settings: dict[str, object] = dict(
        vocab=29, dim=16, layers=3, heads=2, kind=kind, position=PositionConfig(kind="rotary"),
        attention=AttentionConfig(kind="full", max_span=16),
        feedforward=FeedForwardConfig(kind="separable_conv", kernel=3),
    )  # fmt: skip
    return ModelConfig(**(settings | more))  # pyright: ignore[reportArgumentType]


ACT = dict(stack="universal", depth=DepthConfig(kind="act", bias=-0.5))
SETTINGS = {
    "residual": {},
    "mixed": dict(attention=AttentionConfig(kind="1 window(4) + 1 linear"), position=PositionConfig(kind="sinusoidal")),
    "act": ACT,
    "post": dict(order="post"),
    "exits": dict(depth=DepthConfig(kind="exits")),
}


def small(name: str = "residual") -> LM:
    torch.manual_seed(1)
    lm = LM(config(**SETTINGS[name])).double().eval()
    if name == "act":
        with torch.no_grad():
            lm.depth.score.weight.normal_(std=0.3)  # pyright: ignore
    if name == "exits":
        lm.depth.fixed = 2  # pyright: ignore
    return lm


def ids(*shape: int) -> Tensor:
    return torch.randint(29, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_segments_and_decoding_equal_one_pass(name: str) -> None:
    lm, x = small(name), ids(2, 23)
    with torch.no_grad():
        whole = lm(x).logits
        first = lm(x[:, :11])
        second = lm(x[:, 11:12], first.state)  # a segment shorter than the kernel
        by_segments = torch.cat([first.logits, second.logits, lm(x[:, 12:], second.state).logits], 1)
        cache = lm.cache(2)
        by_cache = torch.cat([lm.decode(piece, cache) for piece in (x[:, :9], *x[:, 9:].split(1, 1))], 1)  # pyright: ignore
    torch.testing.assert_close(by_segments, whole, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(by_cache, whole, atol=1e-9, rtol=1e-9)
    if name == "act":
        assert lm.depth is not None and len(lm(x).state.layers) == 3


def test_packed_documents_and_left_padding_equal_single_texts() -> None:
    lm, x = small(), ids(2, 12)
    documents = torch.tensor([0] * 5 + [3] * 7).expand(2, 12)
    packed = lm(x, documents=documents).logits
    torch.testing.assert_close(packed[:, 5:], lm(x[:, 5:]).logits, atol=1e-9, rtol=1e-9)  # rotary: places do not count
    first = lm(x[:, :7], documents=documents[:, :7])
    rest = lm(x[:, 7:], first.state, documents=documents[:, 7:])
    torch.testing.assert_close(rest.logits, packed[:, 7:], atol=1e-9, rtol=1e-9)
    padding = torch.tensor([[True] * 4 + [False] * 8, [False] * 12])
    padded = lm(x, padding=padding).logits
    torch.testing.assert_close(padded[0, 4:], lm(x[:1, 4:]).logits[0], atol=1e-9, rtol=1e-9)


def test_rows_of_different_lengths_crop_fork_and_file(tmp_path) -> None:
    lm, x = small(), ids(2, 14)
    whole = lm(x).logits
    cache = lm.cache(2, slack=4)
    lm.decode(x[:, :8], cache, lengths=torch.tensor([8, 5]))
    rest = torch.stack([x[0, 8:12], x[1, 5:9]])
    found = lm.decode(rest, cache)
    assert found is not None
    torch.testing.assert_close(found[0], whole[0, 8:12], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found[1], whole[1, 5:9], atol=1e-9, rtol=1e-9)
    cache.crop(torch.tensor([9, 7]))
    cache.save(tmp_path / "cache")
    again = cache.load(tmp_path / "cache", lm).fork(2)
    found = lm.decode(torch.stack([x[0, 9:12], x[0, 9:12], x[1, 7:10], x[1, 7:10]]), again)
    assert found is not None
    torch.testing.assert_close(found[1], whole[0, 9:12], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found[2], whole[1, 7:10], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", ["residual", "act"])
def test_the_future_is_not_seen(name: str) -> None:
    lm, x = small(name), ids(1, 20)
    embedded = lm.embedding(x).detach()
    hidden = embedded.clone()
    hidden[:, 13:] = math.nan
    for h in (embedded, hidden):
        h.requires_grad_()
    a, _, _ = lm.run_segment(embedded, lm.start(1))
    b, _, _ = lm.run_segment(hidden, lm.start(1))
    assert torch.equal(a[:, :13], b[:, :13])
    (gradient,) = torch.autograd.grad(a[:, :13].sin().sum(), embedded)
    assert bool(gradient[:, :13].abs().sum() > 0) and not gradient[:, 13:].any()


def test_a_halted_neighbour_is_read_as_it_stands() -> None:
    lm, x, active = small(), torch.randn(1, 7, 16, dtype=F64), torch.tensor([0, 2, 5, 6])
    block, position = lm.ordered_blocks()[0], lm.positions()[0]
    conv, norm = block.feedforward, block.norm2
    assert isinstance(conv, SeparableConv) and norm is not None
    y, _, _ = block(x, lm.empty_memories(x)[0], View(active=active), position)
    found, _, _ = block.attend(x, lm.empty_memories(x)[0], View(), position)
    state = x.clone()
    state[0, active] += found[0, active]
    want = x.clone()
    want[0, active] = state[0, active] + by_hand(conv, norm(state)[0])[active]
    torch.testing.assert_close(y, want)
    assert torch.equal(y[0, [1, 3, 4]], x[0, [1, 3, 4]])


def test_encoder_and_seq2seq() -> None:
    torch.manual_seed(3)
    encoder, x = Encoder(config("encoder", **ACT)).double().eval(), ids(2, 12)
    padding = torch.arange(12).expand(2, 12) >= 9
    out = encoder(x, padding=padding).logits
    torch.testing.assert_close(out[:, :9], encoder(x[:, :9]).logits, atol=1e-9, rtol=1e-9)
    half = EncoderConfig(attention=AttentionConfig(kind="full", max_span=16), position=PositionConfig(kind="rotary"))
    model = Seq2Seq(config("seq2seq", encoder=half)).double().eval()
    source, x = ids(2, 11), ids(2, 8)
    whole = model(source, x).logits
    cache = model.start(source)
    by_cache = torch.cat([model.decode(piece, cache) for piece in x.split(1, 1)], 1)  # pyright: ignore
    torch.testing.assert_close(by_cache, whole, atol=1e-9, rtol=1e-9)


def test_checkpointing_gives_the_same_gradients() -> None:
    lm, x = small("act").train(), ids(2, 15)
    lm(x).logits.sin().sum().backward()
    plain = [p.grad.clone() for p in lm.parameters() if p.grad is not None]
    lm.zero_grad()
    lm.checkpointing = True
    lm(x).logits.sin().sum().backward()
    for a, p in zip(plain, (p for p in lm.parameters() if p.grad is not None), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(a, p.grad)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(stack="reversible"), "with a reversible stack, whose layers feed each token alone"),
        (
            dict(kind="encoder", feedforward=FeedForwardConfig(kind="separable_conv", kernel=4)),
            "kernel is 4; an encoder's",
        ),
    ],
)
def test_bad_combinations_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(**settings)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.feedforward\.kernel is 0; expected at least 1"):
        FeedForwardConfig(kind="separable_conv", kernel=0)
    with pytest.raises(ValueError, match=r"model\.feedforward\.experts is 4 with kind 'separable_conv'"):
        FeedForwardConfig(kind="separable_conv", experts=4)
