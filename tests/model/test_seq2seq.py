"""The encoder–decoder and the encoder against a dense oracle written with plain matrix products, in float64.

Shapes: B batch, S source tokens, T answer tokens, H heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from spanformer import Encoder, Seq2Seq
from spanformer.kinds import KINDS
from spanformer.model.config import (
    AttentionConfig,
    EmbeddingConfig,
    EncoderConfig,
    FeedForwardConfig,
    ModelConfig,
    PositionConfig,
)

VOCAB, B, S, T = 23, 3, 11, 9
SPANS = AttentionConfig(max_span=6, ramp=3.0, init=0.4)
SMALL = ModelConfig(
    kind="seq2seq",
    vocab=VOCAB,
    dim=24,
    layers=2,
    heads=4,
    attention=SPANS,
    feedforward=FeedForwardConfig(kind="relu", dim=20, bias=True),
    encoder=EncoderConfig(layers=3, attention=replace(SPANS, max_span=5)),
)


def position(kind: str) -> ModelConfig:
    p = PositionConfig(kind=kind)  # pyright: ignore[reportArgumentType]
    return replace(SMALL, position=p, encoder=replace(SMALL.encoder, position=p))


CONFIGS = {
    "rotary, pre-norm": SMALL,
    "alibi": position("alibi"),
    "distance_bias": position("distance_bias"),
    "table": position("table"),
    "none": position("none"),
    "post-norm, layer norm": replace(SMALL, order="post", norm="layer"),
    "grouped keys": replace(SMALL, kv_heads=2),
    "tied, another position in each half": replace(
        SMALL, embedding=EmbeddingConfig(tied=True), position=PositionConfig(kind="alibi")
    ),
    **{
        f"{scoring} scores of the source": replace(SMALL, cross=scoring, kv_heads=groups)
        for scoring, groups in (("dot", 0), ("general", 2), ("bilinear", 0), ("additive", 2))
    },
    "windows": replace(
        SMALL,
        attention=AttentionConfig(kind="window(4)"),
        encoder=EncoderConfig(attention=AttentionConfig(kind="window(3)")),
    ),
    "full": replace(
        SMALL, attention=AttentionConfig(kind="full", max_span=64), encoder=EncoderConfig(attention=AttentionConfig())
    ),
    "mixed": replace(
        SMALL,
        attention=replace(SPANS, kind="3 window(4) + 1 adaptive_span"),
        encoder=EncoderConfig(attention=replace(SPANS, kind="2 window(3) + 2 adaptive_span")),
    ),
}  # fmt: skip


def make(config: ModelConfig) -> Seq2Seq:
    torch.manual_seed(7)
    model = Seq2Seq(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.05)
        for module in model.spans_modules():
            module.ratio.copy_(torch.linspace(0.1, 0.9, module.kv_heads))
    return model


def texts(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """source [B, S], its padding, x [B, T]"""
    g = torch.Generator().manual_seed(seed)
    source, x = (torch.randint(0, VOCAB, (B, n), generator=g) for n in (S, T))
    padding = torch.arange(S) >= torch.tensor([S, 4, 1])[:, None]
    return source, padding, x


# ---- the oracle: nothing of the code under test but its weights


def oracle(model: Seq2Seq, source: Tensor, hidden: Tensor, x: Tensor) -> Tensor:
    c = model.config
    states = halves(model.encoder, c.reading_half(), model.embedding.weight[source], hidden, None, None)
    h = halves(model, c, model.embedding.weight[x], None, states, hidden)
    weight = model.embedding.weight if c.embedding.tied else model.head.weight
    return h @ weight.T


def halves(half, config: ModelConfig, h: Tensor, hidden: Tensor | None, states, states_hidden) -> Tensor:
    place = half.position
    for block, parts in zip(half.blocks, config.layer_specs(), strict=True):

        def at(norm, f, h=h):
            return h + f(norm_of(norm, h)) if config.order == "pre" else norm_of(norm, h + f(h))

        h = at(block.norm1, lambda y, b=block, p=parts: self_attention(b.attention, config, p, place, y, hidden))
        if states is not None:
            h = at(block.norm3, lambda y, b=block: cross_attention(b.cross, config, y, states, states_hidden), h)
        f = block.feedforward
        up = lambda y, f=f: (y @ f.up.weight.T + f.up.bias).relu() @ f.down.weight.T + f.down.bias  # noqa: E731
        h = at(block.norm2, up, h)
    return norm_of(half.norm, h) if config.order == "pre" else h


def norm_of(norm, x: Tensor) -> Tensor:
    if isinstance(norm, torch.nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def heads_of(linear, x: Tensor, heads: int, repeats: int = 1) -> Tensor:
    split = torch.stack((x @ linear.weight.T).chunk(heads, -1), 1)
    return split.repeat_interleave(repeats, 1)


def self_attention(attention, config: ModelConfig, parts, position, x: Tensor, hidden: Tensor | None) -> Tensor:
    n, d, groups = config.heads, config.head_dim, config.groups
    q = heads_of(attention.query, x, n)
    k, v = (heads_of(linear, x, groups, n // groups) for linear in (attention.key, attention.value))
    i = torch.arange(x.shape[1])
    distance = i[:, None] - i
    if config.position.kind == "rotary":
        q, k = rotate(q, i), rotate(k, i)
    known = lambda length: distance.abs().clamp(max=length - 1)  # noqa: E731 (beyond a table nothing is seen)
    scores = q @ k.mT
    if config.position.kind == "table":
        scores = scores + torch.einsum("bhid,ijd->bhij", q, position.weight[known(len(position.weight))])
    scores = scores / math.sqrt(d)
    if config.position.kind == "alibi":
        scores = scores - 2.0 ** (-8 / n * torch.arange(1, n + 1).double())[:, None, None] * distance.abs()
    if config.position.kind == "distance_bias":
        scores = scores + position.bias[:, known(position.bias.shape[1])]
    weights = scores.exp() * seen(attention.mechanism, config, parts, distance)
    if config.causal:
        weights = weights * (distance >= 0)
    if hidden is not None:
        weights = weights * ~hidden[:, None, None]
    return mixed(weights, v) @ attention.out.weight.T


def seen(mechanism, config: ModelConfig, parts, distance: Tensor) -> Tensor:
    """[H, T, T] how much of each pair a head sees, its direction aside."""
    spans, rows = iter(m for m in mechanism.modules() if hasattr(m, "ratio")), []
    a, d = config.attention, distance.abs().double()
    for part in parts:
        if part.kind == "adaptive_span":
            z = next(spans).ratio[:, None, None] * a.max_span
            rows.append(((a.ramp + z - d) / a.ramp).clamp(0, 1))
        else:
            width = a.max_span if part.kind == "full" else part.params["window"]
            rows.append((d < width).double().expand(part.heads, -1, -1))
    return torch.cat(rows)


def cross_attention(cross, config: ModelConfig, x: Tensor, states: Tensor, hidden: Tensor) -> Tensor:
    n, groups = config.heads, config.groups
    q = heads_of(cross.query, x, n)
    k, v = (heads_of(linear, states, groups, n // groups) for linear in (cross.key, cross.value))
    m, scoring = cross.mechanism, config.cross
    if scoring in ("general", "bilinear"):
        q = q @ m.weight + (m.bias if scoring == "bilinear" else 0)
    scores = q @ k.mT / (math.sqrt(config.head_dim) if scoring == "scaled" else 1)
    if scoring == "additive":
        scores = ((q @ m.query)[..., None, :] + (k @ m.key)[:, :, None]).tanh() @ m.vector
    return mixed(scores.exp() * ~hidden[:, None, None], v) @ cross.out.weight.T


def mixed(weights: Tensor, v: Tensor) -> Tensor:
    """[B, H, T, T] and [B, H, T, D] → [B, T, H·D]; a row that sees nothing gives zeros."""
    out = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ v
    return torch.cat(out.unbind(1), -1)


def rotate(x: Tensor, at: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = at[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


# ---- tests


@pytest.mark.parametrize("name", CONFIGS)
def test_seq2seq_equals_the_dense_model(name: str) -> None:
    model = make(CONFIGS[name])
    source, hidden, x = texts()
    found = model(source, x, source_padding=hidden).logits
    torch.testing.assert_close(found, oracle(model, source, hidden, x), rtol=1e-9, atol=1e-9)


def test_every_gradient_equals_the_dense_model() -> None:
    model = make(SMALL)
    source, hidden, x = texts()
    y = x.roll(1, 1)
    named = dict(model.named_parameters())
    output = model(source, x, targets=y, source_padding=hidden)
    found = torch.autograd.grad(output.nll.sum(), list(named.values()))
    nll = -oracle(model, source, hidden, x).log_softmax(-1).gather(2, y[..., None])[..., 0]
    torch.testing.assert_close(output.nll, nll)
    expected = torch.autograd.grad(nll.sum(), list(named.values()))
    for name, a, b in zip(named, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
        assert float(b.abs().max()) > 0, name


@pytest.mark.parametrize("name", ["rotary, pre-norm", "mixed", "alibi"])
def test_decoder_is_causal(name: str) -> None:
    model = make(CONFIGS[name])
    source, hidden, x = texts()
    before = model(source, x, source_padding=hidden).logits
    for at in (1, 5, T - 1):
        other = x.clone()
        other[:, at:] = (other[:, at:] + 1) % VOCAB
        after = model(source, other, source_padding=hidden).logits
        torch.testing.assert_close(after[:, :at], before[:, :at], rtol=0, atol=1e-12)
        assert (after[:, at] - before[:, at]).abs().max() > 1e-3


def test_every_answer_token_sees_all_of_the_source() -> None:
    model = make(CONFIGS["full"])
    source, _, x = texts()
    before = model(source, x).logits
    for at in (0, S // 2, S - 1):
        other = source.clone()
        other[:, at] = (other[:, at] + 1) % VOCAB
        assert float((model(other, x).logits - before).detach().abs().amax(-1).min()) > 1e-6


def test_padding_never_leaks() -> None:
    model = make(SMALL)
    source, hidden, x = texts()
    before = model(source, x, source_padding=hidden).logits
    other = torch.where(hidden, (source + 5) % VOCAB, source)
    torch.testing.assert_close(model(other, x, source_padding=hidden).logits, before, rtol=0, atol=1e-12)
    alone = model(source[1:2, :4], x[1:2]).logits  # without the padding, and without the other rows
    torch.testing.assert_close(alone, before[1:2], rtol=0, atol=1e-12)
    behind = torch.arange(T) >= torch.tensor([T, 6, 3])[:, None]
    padded = torch.where(behind, (x + 3) % VOCAB, x)
    after = model(source, padded, source_padding=hidden, padding=behind).logits
    torch.testing.assert_close(after[~behind], before[~behind], rtol=0, atol=1e-12)
    first = torch.tensor([[True, True, *[False] * T]]).expand(B, -1)  # padding before the answer: only distances count
    shifted = model(source, torch.cat([x[:, :2] * 0, x], 1), source_padding=hidden, padding=first).logits
    torch.testing.assert_close(shifted[:, 2:], before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_equals_teacher_forcing(name: str) -> None:
    model = make(CONFIGS[name])
    source, hidden, x = texts()
    whole = model(source, x, source_padding=hidden).logits
    cache = model.start(source, hidden)
    kept = [(s.k.data_ptr(), s.v.data_ptr()) for s in cache.sources]
    parts = [model.decode(part, cache) for part in x.split([1, 1, 3, 1, T - 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert kept == [(s.k.data_ptr(), s.v.data_ptr()) for s in cache.sources]  # made once
    cache = model.start(source, hidden)
    model.decode(x[:, :4], cache)
    cache.reorder(torch.tensor([2, 0]))
    turned = model.decode(x[[2, 0], 4:], cache.fork(1))
    torch.testing.assert_close(turned, whole[[2, 0], 4:], rtol=1e-9, atol=1e-9)


ALIKE_BOTH_WAYS = ("none", "table", "alibi", "distance_bias", "da_transformer")
"""which read |i − j|: an encoder with them cannot tell a text from its reverse"""


@pytest.mark.parametrize("kind", get_args(get_type_hints(PositionConfig)["kind"]))
def test_every_position_in_both_halves(kind: str) -> None:
    config = replace(SMALL, position=PositionConfig(kind=kind, length=32))  # pyright: ignore[reportArgumentType]
    model = make(replace(config, encoder=replace(config.encoder, position=config.position)))
    source, hidden, x = texts()
    whole = model(source, x, source_padding=hidden).logits
    padded = torch.where(hidden, (source + 5) % VOCAB, source)
    cache = model.start(padded, hidden)
    parts = [model.decode(part, cache) for part in x.split([1, 1, 3, 1, T - 6], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    wide = replace(config.encoder, attention=AttentionConfig(kind="full"), position=config.position)
    model = make(replace(config, encoder=wide))
    turned = model(source.flip(1), x).logits - model(source, x).logits
    assert (float(turned.detach().abs().max()) > 1e-6) == (kind not in ALIKE_BOTH_WAYS)


def test_recomputing_activations_changes_nothing() -> None:
    model = make(SMALL).train()
    source, hidden, x = texts()
    grads = []
    for model.checkpointing in (False, True):
        model.zero_grad()
        model(source, x, targets=x, source_padding=hidden).nll.sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


ENCODER = SMALL.reading_half()


def encoder() -> Encoder:
    torch.manual_seed(3)
    return Encoder(ENCODER).double().eval()


def test_encoder_sees_both_directions_and_no_padding() -> None:
    model = encoder()
    source, hidden, _ = texts()
    before = model(source, padding=hidden).logits
    states = halves(model, ENCODER, model.embedding.weight[source], hidden, None, None)
    shown = ~hidden
    torch.testing.assert_close(before[shown], (states @ model.head.weight.T)[shown], rtol=1e-9, atol=1e-9)
    other = torch.where(hidden, (source + 5) % VOCAB, source)
    torch.testing.assert_close(model(other, padding=hidden).logits[shown], before[shown], rtol=0, atol=1e-12)
    later = source.clone()
    later[0, 5] = (later[0, 5] + 1) % VOCAB
    change = (model(later, padding=hidden).logits - before)[0].detach().abs().amax(-1)
    assert float(change[4]) > 1e-4 and float(change[6]) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_works_in_an_encoder_or_is_refused(kind: str) -> None:
    """And looks back only in the decoder of an encoder–decoder. With distances where the kind takes them."""
    try:
        _check_directions(kind, "t5")
    except ValueError as refused:
        assert "position" in str(refused) or "distances" in str(refused)
        _check_directions(kind, "none")


def _check_directions(kind: str, place: str) -> None:
    source, hidden, x = texts()
    encoder_only = kind.startswith(("etc", "linformer"))
    small = (
        KINDS[kind].tested[0] if kind in ("linformer", "low_rank", "sinkhorn") else kind
    )  # their sizes must fit the text
    blocks = kind.startswith(("strided", "fixed"))  # of 64 tokens
    attention = AttentionConfig(kind=small, max_span=64 if blocks else 32, window=8)
    position = PositionConfig(kind=place)
    try:
        model = Encoder(replace(ENCODER, attention=attention, position=position, layers=1)).double().eval()
    except ValueError as refused:
        if f"model.attention.kind is {kind!r}, which is causal only" not in str(refused):
            raise
    else:
        later = source.clone()
        later[:, 6] = (later[:, 6] + 1) % VOCAB
        change = (model(later).logits - model(source).logits).detach().abs().amax(-1)
        least = torch.max if kind.startswith("hard") else torch.min  # a hard query may choose another key in some row
        assert float(least(change[:, :6].amax(1))) > 1e-6 and float(least(change[:, 7:].amax(1))) > 1e-6
        padded = torch.where(hidden, (source + 5) % VOCAB, source)
        found, again = (model(ids, padding=hidden).logits[~hidden] for ids in (source, padded))
        torch.testing.assert_close(found, again, rtol=0, atol=1e-12)
    if encoder_only:  # no decoder can be made of it
        return
    model = make(replace(SMALL, attention=attention, position=position))
    later = x.clone()
    later[:, 6:] = (later[:, 6:] + 1) % VOCAB
    before, after = (model(source, ids, source_padding=hidden).logits for ids in (x, later))
    torch.testing.assert_close(after[:, :6], before[:, :6], rtol=0, atol=1e-12)


def test_encoder_logits_at_selected_positions() -> None:
    model = encoder()
    source, _, _ = texts()
    at = torch.tensor([[0, 3, 10]] * B)
    everywhere = model(source).logits
    some = model(source, at=at)
    torch.testing.assert_close(some.logits, everywhere[:, [0, 3, 10]])
    nll = model(source, at=at, targets=source[:, [0, 3, 10]]).nll
    expected = -some.logits.log_softmax(-1).gather(2, source[:, [0, 3, 10], None])[..., 0]
    torch.testing.assert_close(nll, expected)


def test_bad_input_gets_a_sentence() -> None:
    model, (source, hidden, x) = make(SMALL), texts()
    cases = {
        r"^source has 2 rows and x 3; expected one answer for each source$": lambda: model(source[:2], x),
        r"^source has shape \[3, 11\] and dtype torch.float32; expected token ids \[B, T\], B and T at least 1$": (
            lambda: model(source.float(), x)
        ),
        r"^x has shape \[9\] and dtype torch.int64; expected token ids \[B, T\], B and T at least 1$": lambda: model(
            source, x[0]
        ),
        r"^targets has shape \[3, 8\]; expected \[3, 9\], as x has$": lambda: model(source, x, targets=x[:, 1:]),
        r"^source_padding has shape \[3, 10\] and dtype torch.bool; expected \[3, 11\] of torch.bool, True for": (
            lambda: model(source, x, source_padding=hidden[:, 1:])
        ),
        r"^padding has shape \[3, 11\] and dtype torch.bool; expected \[3, 9\]": (
            lambda: model(source, x, padding=hidden)
        ),
        r"^token 45 is outside the vocabulary; expected 0 … 22$": lambda: model(source + 23 * hidden, x),
        r"^the KV cache of an encoder–decoder cannot be saved; call start again instead$": (
            lambda: model.start(source).save("x")
        ),
        r"^x has shape \[2, 9\]; expected 3 rows, as the KV cache has$": lambda: model.decode(
            x[:2], model.start(source)
        ),
        r"^at has shape \[2, 1\] and dtype torch.int64; expected positions \[3, N\] of torch.int64$": (
            lambda: encoder()(source, at=torch.zeros(2, 1, dtype=torch.int64))
        ),
        r"^model.kind is 'seq2seq'; expected 'encoder' for Encoder$": lambda: Encoder(SMALL),
        r"^model.kind is 'lm'; expected 'seq2seq' for Seq2Seq$": lambda: Seq2Seq(ModelConfig(vocab=9)),
        r"^model.kind is 'gpt'; expected one of lm, seq2seq, encoder$": lambda: replace(SMALL, kind="gpt"),  # pyright: ignore
        r"^model.cross is 'cosine'; expected one of scaled, dot, general, bilinear, additive, hard, hard_sampled$": (
            lambda: replace(SMALL, cross="cosine")  # pyright: ignore
        ),
        r"^model.cross is set, and model.kind is 'lm'; expected kind 'seq2seq'$": (
            lambda: replace(SMALL, kind="lm", encoder=EncoderConfig(), cross="dot")
        ),
        r"^model.encoder is set, and model.kind is 'lm'; expected kind 'seq2seq'$": lambda: replace(SMALL, kind="lm"),
        r"^model.paper_compat is set, and model.kind is 'seq2seq'; the paper's code has language models only": (
            lambda: replace(SMALL, paper_compat=True)
        ),
    }
    for sentence, call in cases.items():
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize("kind", ["2 window(8) + 2 lsh(6, 4, 2)", "2 routing(5, 3) + 2 window(4)", "low_rank(5, 20)"])
def test_decoder_with_its_own_memories_trains_and_decodes(kind: str) -> None:
    torch.manual_seed(0)
    none = PositionConfig(kind="none")
    made = replace(SMALL, attention=AttentionConfig(kind=kind, max_span=20), position=none,
                   encoder=replace(SMALL.encoder, position=none))  # fmt: skip
    model = Seq2Seq(made).double()
    source, x = torch.randint(VOCAB, (2, S)), torch.randint(VOCAB, (2, 30))
    found = model(source, x, targets=x)
    assert found.nll is not None
    (found.nll.mean() + (0 if found.penalty is None else found.penalty)).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.eval()
    cache = model.start(source)
    parts = [model.decode(piece, cache) for piece in x.split([7, 1, 1, 1, 12, 8], 1)]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), model(source, x).logits)
