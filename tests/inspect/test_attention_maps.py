"""Maps of attention weights, against weights computed from a layer's own projections."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from spanformer.attention import Window
from spanformer.inspect.attention_maps import LONGEST, attention_maps, pair_maps
from spanformer.model.config import EncoderConfig
from spanformer.model.encoder import Encoder
from spanformer.model.seq2seq import Seq2Seq
from support.small_models import CONFIGS, SMALL, make, text, with_attention

T = 23


def seen_by(lm, ids):
    """What each layer's attention is given."""
    inputs = []
    hooks = [block.attention.register_forward_pre_hook(lambda _m, args: inputs.append(args)) for block in lm.blocks]
    with torch.no_grad():
        lm(ids[None])
    for hook in hooks:
        hook.remove()
    return [args[0][0] for args in inputs]


@pytest.mark.parametrize("kind", ["full", "window", "none"])
def test_maps_equal_the_equation(kind):
    """Without positions: softmax of q·k/√D, the span's mask or the window's included."""
    config = replace(CONFIGS[kind], position=CONFIGS["none"].position)
    lm, ids = make(config), text(1, T)[0]
    maps = attention_maps(lm, ids)
    for x, block, found in zip(seen_by(lm, ids), lm.blocks, maps, strict=True):
        for head in range(4):
            q, k = (getattr(block.attention, name).weight[head * 8 : head * 8 + 8] @ x.T for name in ("query", "key"))
            for i in range(T):
                weight = torch.zeros(T, dtype=torch.float64)
                for j in range(i + 1):
                    m = 1.0
                    if kind == "window":
                        m = float(i - j < 9)
                    if kind == "none":
                        z = block.attention.mechanism.spans()[head]
                        m = min(max((5.0 + z - (i - j)) / 5.0, 0.0), 1.0)
                    weight[j] = m * math.exp(float(q[:, i].detach() @ k[:, j].detach()) / math.sqrt(8))
                torch.testing.assert_close(found[head, i], weight / weight.sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_maps_and_is_unchanged(name):
    lm, ids = make(CONFIGS[name]), text(1, T)[0]
    before = lm(ids[None]).logits
    backends = [m.backend for m in lm.mechanisms()]
    maps = attention_maps(lm, ids)
    assert len(maps) == 3 and all(m.shape == (4, T, T) for m in maps)
    for m in maps:
        assert torch.equal(m.triu(1), torch.zeros_like(m)) and float(m.min()) >= 0
        rows = m.sum(-1)
        assert bool((rows <= 1 + 1e-9).all())
        if name != "persistent":
            torch.testing.assert_close(rows, torch.ones_like(rows))
        else:
            assert float(rows.max()) < 1
    assert torch.equal(lm(ids[None]).logits, before) and [m.backend for m in lm.mechanisms()] == backends


def test_heads_in_groups_keep_their_order():
    """The paper's conventions remember zeros before the text, so that heads of different spans are served apart."""
    config = with_attention(replace(CONFIGS["paper"], paper_compat=True), max_span=400)
    lm, ids = make(config), text(1, T)[0]
    maps = attention_maps(lm, ids)
    for block, found in zip(lm.blocks, maps, strict=True):
        spans = block.attention.mechanism.spans()
        for head in range(4):  # the farthest key with weight is as far as the head's span and ramp go
            i = T - 1
            far = max(i - j for j in range(T) if found[head, i, j] > 0)
            assert far == min(i, math.ceil(float(spans[head]) + 5)), head
        assert bool((found[:, :4].sum(-1) < 1).all())  # the first tokens also look at the zeros


def test_mechanism_without_weights_is_refused():
    class Twice(Window):
        def forward(self, q, k, v, rule, view):
            found = super().forward(q, k, v, rule, view)
            return found._replace(out=found.out.square())

    lm = make(SMALL)
    lm.blocks[1].attention.mechanism = Twice(4, 8)
    with pytest.raises(ValueError, match=r"layer 2 \(Twice\) does not compute its output by attention weights alone"):
        attention_maps(lm, text(1, 9)[0])
    assert not lm.blocks[1].attention.mechanism._forward_hooks


@pytest.mark.parametrize("kind", ["etc(3, 4)", "etc_projected(3, 4, 2, true)", "longformer(4, 2)"])
def test_rows_of_tokens_with_projections_of_their_own_sum_to_one(kind):
    model = Encoder(replace(with_attention(SMALL, kind=kind), kind="encoder", position=CONFIGS["none"].position))
    for found in attention_maps(model.double(), text(1, T)[0]):
        size = T + (-(-T // 4) if "etc" in kind else 0)
        assert found.shape == (4, size, size)
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


def test_long_text_is_refused():
    with pytest.raises(ValueError, match=rf"ids has shape \[{LONGEST + 1}\].*expected 1 … {LONGEST} token ids"):
        attention_maps(make(SMALL), torch.zeros(LONGEST + 1, dtype=torch.long))


def pair_of(**changes):
    """An encoder–decoder of other layers in each half, a source [S] and the decoder's text [T]."""
    torch.manual_seed(5)
    config = replace(SMALL, kind="seq2seq", layers=2, encoder=EncoderConfig(layers=3), **changes)
    model = Seq2Seq(config).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    model.after_step()
    return model, text(1, 11)[0], text(1, 7)[0]


SCORES = {
    "scaled": lambda _m, q, k: k @ q / math.sqrt(8),
    "dot": lambda _m, q, k: k @ q,
    "general": lambda m, q, k: k @ (q @ m.weight),
    "bilinear": lambda m, q, k: k @ (q @ m.weight + m.bias),
    "additive": lambda m, q, k: (q @ m.query + k @ m.key).tanh() @ m.vector,
}
"""of a mechanism m, a query [8] and keys [S, 8]"""


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("scoring", SCORES)
def test_cross_maps_equal_the_equation(scoring, kv_heads):
    """a_ij = softmax_j of the score of the decoder's query i and the encoder's key j."""
    model, source, x = pair_of(cross=scoring, kv_heads=kv_heads)
    given = []
    crosses = [block.cross for block in model.layers() if block.cross is not None]
    hooks = [cross.query.register_forward_pre_hook(lambda _m, args: given.append(args[0][0])) for cross in crosses]
    with torch.no_grad():
        model(source[None], x[None])
        states = model.encode(source[None])[0][0]
    for hook in hooks:
        hook.remove()
    for h, cross, found in zip(given, crosses, pair_maps(model, source, x).cross, strict=True):
        assert found.shape == (4, 7, 11)
        for head in range(4):
            shared = head * (kv_heads or 4) // 4
            q = h @ cross.query.weight[head * 8 : head * 8 + 8].T
            k = states @ cross.key.weight[shared * 8 : shared * 8 + 8].T
            for i in range(7):
                weight = SCORES[scoring](cross.mechanism, q[i], k).detach().exp()
                torch.testing.assert_close(found[head, i], weight / weight.sum(), rtol=1e-9, atol=1e-12)


def test_encoder_and_decoder_have_maps_and_model_is_unchanged():
    model, source, x = pair_of()
    before = model(source[None], x[None]).logits
    model.train()
    maps = pair_maps(model, source, x)
    assert [[tuple(m.shape) for m in part] for part in maps] == [[(4, 11, 11)] * 3, [(4, 7, 7)] * 2, [(4, 7, 11)] * 2]
    for m in (m for part in maps for m in part):
        torch.testing.assert_close(m.sum(-1), torch.ones_like(m[..., 0]))
    assert all(bool(m.triu(1).any()) for m in maps.encoder) and not any(bool(m.triu(1).any()) for m in maps.decoder)
    assert model.training and torch.equal(model.eval()(source[None], x[None]).logits, before)
    assert {block.cross.mechanism.backend for block in model.layers() if block.cross is not None} == {"auto"}
    assert not any(part._forward_hooks for part in model.modules())


def test_later_target_tokens_change_no_earlier_row():
    model, source, x = pair_of()
    whole, begun = pair_maps(model, source, x), pair_maps(model, source, x[:3])
    for a, b in zip(whole.cross, begun.cross, strict=True):
        torch.testing.assert_close(a[:, :3], b)


def test_each_text_of_a_pair_is_checked_by_its_name():
    model, source, x = pair_of()
    with pytest.raises(ValueError, match=r"^source has shape \[1, 11\] and dtype torch.int64; expected 1 … 1024 token"):
        pair_maps(model, source[None], x)
    with pytest.raises(ValueError, match=r"^x has shape \[0\]"):
        pair_maps(model, source, x[:0])
