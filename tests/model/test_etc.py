"""Encoders with ETC's global tokens: against the equation, and the contrastive loss of whole segments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer import Encoder
from spanformer.attention.etc import Structure
from spanformer.data import mask_segments, mask_tokens
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.cpc import SHARE, nce
from support.dense_models import above, rms, two_streams

MASK = 19
SMALL = ModelConfig(
    vocab=20, dim=16, layers=2, heads=2, kind="encoder", attention=AttentionConfig(kind="etc(3, 4, 2)"),
    position=PositionConfig(kind="none"),
)  # fmt: skip


def make(kind: str = "etc(3, 4, 2)", **changes) -> Encoder:
    torch.manual_seed(0)
    return Encoder(replace(SMALL, attention=AttentionConfig(kind=kind), **changes))


def text(b: int = 2, n: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(0, 19, (b, n), generator=torch.Generator().manual_seed(seed))


class TestEquation:
    """One layer without feed-forward: logits of global and long tokens and every gradient, in float64."""

    def expected(self, model: Encoder, x: Tensor, segments: Tensor, padding: Tensor) -> Tensor:
        block, n = model.blocks[0], x.shape[1]
        h = model.embedding.weight[x]  # pyright: ignore
        top = above(model, h)
        assert top is not None
        there = [
            [any(row[i] == g and not hidden[i] for i in range(n)) for g in range(top.shape[1])]
            for row, hidden in zip(segments, padding, strict=True)
        ]
        structure = Structure(segments, padding, ~torch.tensor(there))
        found, summed = two_streams(block.attention, rms(h, block.norm1), rms(top, block.norm1), structure)
        return rms(torch.cat([top + summed, h + found], 1), model.norm) @ model.head.weight.T  # pyright: ignore

    @pytest.mark.parametrize("given", [True, False])
    @pytest.mark.parametrize(
        "kind", ["etc(3, 4, 2)", "etc(3, 4, 2, true)", "etc_projected(3, 4, 2)", "etc_projected(3, 4, 2, true)"]
    )
    @pytest.mark.parametrize(("backend", "dtype"), [("banded", torch.float64), ("native", torch.float32)])
    def test_etc_equals_the_oracle(self, kind, backend, dtype, given):
        model = make(kind, layers=1, feedforward=FeedForwardConfig(kind="none")).double()
        model.mechanisms()[0].backend = backend
        with torch.no_grad():
            for p in model.parameters():  # what starts at zero would hide what is behind it
                p.add_(torch.randn_like(p), alpha=0.2)
        x = text(2, 13)
        segments, padding = (torch.arange(13) // 4).expand(2, 13).clone(), torch.zeros(2, 13, dtype=torch.bool)
        options = {}
        if given:
            segments[0] = torch.tensor([0, 0, 2, 2, 2, -1, -1, 1, 1, 1, 1, 1, 1])  # the fourth has no token
            padding[1, 8:] = True
            options = {"segments": segments, "padding": padding}
        missing = torch.zeros(2, 4, dtype=torch.bool)
        missing[0, 3] = missing[1, 2:] = given
        missing = torch.cat([missing, padding], 1)[..., None]
        weight = torch.randn(2, 17, 20, dtype=torch.float64).masked_fill(missing, 0)

        def gradients(run) -> dict[str, Tensor]:
            model.zero_grad()
            out = run()
            (out * weight.to(out.dtype)).sum().backward()
            shown = out.detach().masked_fill(missing, 0)
            return {"logits": shown, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

        wanted = gradients(lambda: self.expected(model, x, segments, padding))
        model.to(dtype)

        def ours() -> Tensor:
            encoded = model.encode(model.embedding(x), **options)
            return model.head.logits(torch.cat([encoded.summaries, encoded.states], 1))

        found = gradients(ours)
        assert set(found) == set(wanted)
        for name, right in wanted.items():
            error = (found[name].double() - right).abs().max() / right.abs().max()
            assert error < (1e-10 if dtype == torch.float64 else 2e-5), name


class TestEncoder:
    def test_every_parameter_learns(self):
        for kind in ("etc(3, 4, 2)", "etc_projected(3, 4, 2)"):
            model, x = make(kind), text()
            hidden = mask_segments(x.numpy(), np.arange(12)[None].repeat(2, 0) // 4, 0.5, mask=MASK, seeds=[(0,), (1,)])
            found = model(**{name: torch.from_numpy(a) for name, a in vars(hidden).items()}, targets=x)
            (found.nll.mean() + found.penalty).backward()
            lazy = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}
            assert not lazy, lazy

    def test_shapes_of_what_is_encoded(self):
        found = make().encode(torch.randn(2, 11, 16))
        assert found.states.shape == (2, 11, 16) and found.summaries.shape == (2, 3, 16)
        assert make("window(4)").encode(torch.randn(2, 11, 16)).summaries.shape == (2, 0, 16)

    def test_own_projections_start_as_the_layers(self):
        """So that both are the same function before training."""
        one, own = make("etc(3, 4, 2)"), make("etc_projected(3, 4, 2)")
        known = one.state_dict()
        own.load_state_dict(known, strict=False)
        for block in own.layers():
            a = block.attention
            a.mechanism.start_from(a.query, a.key, a.value)
        assert torch.allclose(one(text()).logits, own(text()).logits, atol=1e-5)
        assert len(own.state_dict()) == len(known) + 2 * 7

    def test_padding_changes_nothing(self):
        model, x = make().eval(), text()
        padding = torch.zeros(2, 15, dtype=torch.bool)
        padding[:, 12:] = True
        more = model(F.pad(x, (0, 3), value=7), padding=padding).logits
        assert torch.allclose(more[:, :12], model(x).logits, atol=1e-5)  # pyright: ignore

    def test_far_tokens_have_effect_through_global_tokens_only(self):
        """Two layers of radius 3 reach 6 tokens; the first token reaches the last by l2g of what g2l took."""
        model, x = make().eval(), text(b=1)
        changed = x.clone()
        changed[0, 0] = (x[0, 0] + 1) % 19

        def moved(**options) -> Tensor:
            return (model(x, **options).logits - model(changed, **options).logits).abs().amax(2)[0]  # pyright: ignore

        assert (moved() > 1e-7).all()
        none = torch.full((1, 12), -1)  # no global token has a segment: none is there
        assert (moved(segments=none)[:7] > 1e-7).all() and (moved(segments=none)[7:] == 0).all()

    def test_hard_summaries_of_one_layer_see_their_segment_only(self):
        model, x = make("etc(3, 4, 2, true)", layers=1).eval(), text(b=1)
        changed = x.clone()
        changed[0, 0] = (x[0, 0] + 1) % 19
        a, b = (model.encode(model.embedding(t)).summaries for t in (x, changed))
        moved = (a - b).abs().amax(2)[0]
        assert moved[0] > 1e-6 and (moved[1:] == 0).all()

    def test_masked_tokens_are_learned(self):
        """Each segment repeats one word: a masked one is known from its neighbours."""
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for step in range(60):
            g = torch.Generator().manual_seed(step)
            x = torch.randint(0, 19, (8, 3), generator=g).repeat_interleave(4, 1)
            hidden = mask_tokens(x.numpy(), 0.25, vocab=19, mask=MASK, seeds=[(step, row) for row in range(8)])
            seen, at, targets = (torch.from_numpy(a) for a in (hidden.x, hidden.at, hidden.y))
            loss = model(seen, at=at, targets=targets).nll.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] > 2.5 and sum(losses[-10:]) / 10 < 1.6, losses

    def test_etc_as_encoder_of_an_encoder_decoder(self):
        from spanformer import Seq2Seq
        from spanformer.model.config import EncoderConfig

        reading = EncoderConfig(attention=AttentionConfig(kind="etc(3, 4)"), position=PositionConfig(kind="none"))
        model = Seq2Seq(ModelConfig(vocab=20, dim=16, layers=1, heads=2, kind="seq2seq", encoder=reading))
        assert model(text(), text(n=5)).logits.shape == (2, 5, 20)  # pyright: ignore

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "lm"}, "etc reads a whole text in both directions; expected model.kind 'encoder'"),
            (
                {"heads": 4, "kv_heads": 2},
                "model.kv_heads is set, and etc adds labels to the keys of every head; expected kv_heads 0",
            ),
            ({"position": PositionConfig(kind="rotary")}, "model.position.kind is 'rotary'; etc encodes distances by"),
            ({"attention": AttentionConfig(stack=("etc", "window(8)"))}, "model.attention.stack mixes etc with other"),
            ({"attention": AttentionConfig(stack=("etc(8, 4)", "etc(8, 2)"))}, "or etc of different segments"),
            ({"attention": AttentionConfig(kind="1 etc + 1 window(8)")}, "GlobalLocal"),
            (
                {"attention": AttentionConfig(kind="etc_projected"), "persistent": 3},
                "model.persistent is set, and global",
            ),
            (
                {"attention": AttentionConfig(kind="longformer(8, 2)"), "persistent": 3},
                "of longformer have separate queries; set persistent to 0",
            ),
        ],
    )
    def test_unsupported_combinations_are_refused(self, changes, message):
        from spanformer import LM

        config = replace(replace(SMALL, attention=AttentionConfig(kind="etc")), **changes)
        with pytest.raises(ValueError, match=message):
            (LM if config.kind == "lm" else Encoder)(config)

    def test_layers_may_differ_in_radius(self):
        model = Encoder(replace(SMALL, attention=AttentionConfig(stack=("etc(1, 4)", "etc(5, 4)"))))
        assert model(text()).logits is not None

    def test_bad_inputs_are_refused(self):
        x = text()
        with pytest.raises(ValueError, match=r"segments holds 3; expected −1 … 2, as there are 3 global tokens"):
            make()(x, segments=torch.full((2, 12), 3))
        with pytest.raises(ValueError, match="segments is given, and no layer has global tokens"):
            make("window(4)")(x, segments=torch.zeros_like(x))
        picked = torch.zeros(2, 2, dtype=torch.long)
        with pytest.raises(ValueError, match="some of picked, alone and alone_padding are missing"):
            make()(x, picked=picked)
        alone = {"alone": torch.zeros(2, 2, 3, dtype=torch.long), "alone_padding": torch.zeros(2, 2, 3) > 0}
        with pytest.raises(ValueError, match="picked holds 9 … 9; expected segments 0 … 2"):
            make()(x, picked=picked + 9, **alone)
        with pytest.raises(ValueError, match=r"picked has shape \[2, 2\] and dtype torch.int32"):
            make()(x, picked=picked.int(), **alone)
        with pytest.raises(ValueError, match="some of picked, alone and alone_padding are missing"):
            make()(x, **alone)
        for wrong in (torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 12)):
            with pytest.raises(ValueError, match=r"segments has shape \[2, .*expected \[2, 12\] integers"):
                make()(x, segments=wrong)
        with pytest.raises(ValueError, match="global_attention_mask is given, and no layer has global tokens"):
            make("window(4)")(x, global_attention_mask=torch.zeros(2, 12, dtype=torch.bool))
        with pytest.raises(ValueError, match="expected token ids \\[B, T\\], B and T at least 1"):
            make()(x[:, :0])


class TestContrastive:
    def test_picked_segments_are_masked_and_returned(self):
        ids, segments = text(3, 20).numpy(), (np.arange(20) // 4 * np.ones((3, 1), int)).astype(int)
        segments[:, -2:] = -1  # of no segment
        segments[0, :6] = -1
        seen = np.where(np.arange(20) % 7 == 0, MASK, ids)
        found = mask_segments(ids, segments, 0.5, mask=MASK, seeds=[(row,) for row in range(3)], seen=seen)
        assert found.picked.shape == (3, 2)  # half of the four that the first row has
        expected = seen.copy()
        for row, numbers in enumerate(found.picked):
            for place, number in enumerate(numbers):
                its = [i for i in range(20) if segments[row, i] == number]
                assert found.alone[row, place][~found.alone_padding[row, place]].tolist() == ids[row, its].tolist()
                expected[row, its] = MASK
        assert (found.x == expected).all() and found.x.dtype == np.int64
        again = mask_segments(ids[1:], segments[1:], 0.5, mask=MASK, seeds=[(1,), (2,)])
        assert (again.picked == found.picked[1:]).all()

    def test_at_least_two_segments_are_masked(self):
        ids, segments = np.zeros((40, 40), int), np.broadcast_to(np.arange(40) // 4, (40, 40))
        seeds = [(row,) for row in range(40)]
        assert mask_segments(ids, segments, 1e-9, mask=1, seeds=seeds).picked.shape == (40, 2)
        picked = mask_segments(ids, segments, 0.3, mask=1, seeds=seeds).picked
        assert picked.shape == (40, 3) and set(picked.ravel()) == set(range(10))

    def test_loss_equals_its_equation(self):
        g = torch.Generator().manual_seed(0)
        p, c = (torch.randn(5, 7, generator=g, dtype=torch.float64) for _ in range(2))
        expected = 0.0
        for s in range(5):
            scores = [float(p[s] @ c[t]) / math.sqrt(7) for t in range(5)]
            expected -= math.log(math.exp(scores[s]) / sum(map(math.exp, scores))) / 5
        assert float(nce(p, c)) == pytest.approx(expected, rel=1e-12)
        assert float(nce(torch.zeros(5, 7), c.float())) == pytest.approx(math.log(5))

    def test_loss_is_least_where_the_codes_are_matched(self):
        """Codes at equal angles; among guesses of the codes' length none is better than the codes themselves."""
        codes = 3 * F.normalize(torch.eye(6, dtype=torch.float64) - 1 / 6, dim=1)
        matched = nce(codes, codes)
        assert matched < nce(codes.roll(1, 0), codes)
        g = torch.Generator().manual_seed(0)
        for size in (1e-3, 0.1, 1.0, 10.0):
            for _ in range(20):
                other = codes + size * torch.randn(6, 6, generator=g, dtype=torch.float64)
                assert nce(3 * F.normalize(other, dim=1), codes) > matched

    def test_penalty_is_that_of_summaries_guessed_and_read_alone(self):
        model, x = make().eval(), text(3, 14)
        segments = (torch.arange(14) // 4).expand(3, 14)
        found = mask_segments(x.numpy(), segments.numpy(), 0.5, mask=MASK, seeds=[(row,) for row in range(3)])
        guesses, codes = [], []
        for row, numbers in enumerate(found.picked):
            above = model.encode(model.embedding(torch.from_numpy(found.x[row : row + 1]))).summaries[0]
            for number in numbers:
                guesses.append(above[number])
                its = x[row, segments[row] == number]
                codes.append(model.encode(model.embedding(its[None])).summaries[0, 0])
        tensors = {name: torch.from_numpy(a) for name, a in vars(found).items()}
        penalty = model(**tensors).penalty
        assert torch.allclose(penalty, SHARE * nce(torch.stack(guesses), torch.stack(codes)), atol=1e-6)

    def test_training_distinguishes_segments(self):
        """A masked segment has words of its own, known by the text's topic and by where it stands in it."""
        topics, sentences, words = 4, 3, 2
        torch.manual_seed(0)
        model = Encoder(replace(SMALL, vocab=1 + topics * sentences * words, dim=32))
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        segments = (torch.arange(12) // 4).expand(topics, 12)
        losses = []
        for step in range(60):
            g = torch.Generator().manual_seed(step)
            topic = torch.randperm(topics, generator=g)[:, None]
            x = (topic * sentences + segments) * words + torch.randint(words, segments.shape, generator=g)
            seeds = [(step, row) for row in range(topics)]
            hidden = mask_segments(x.numpy(), segments.numpy(), 0.25, mask=model.mask, seeds=seeds)
            loss = model(**{name: torch.from_numpy(a) for name, a in vars(hidden).items()}).penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item() / SHARE / math.log(8))  # 1: guesses that know nothing
        assert sum(losses[:5]) / 5 > 0.8 and sum(losses[-20:]) / 20 < 0.6, losses

    def test_bad_input_is_refused(self):
        x, seeds = text().numpy(), [(0,), (1,)]
        with pytest.raises(ValueError, match=r"ids has shape \[2, 12\] and segments \[2, 11\]; expected \[B, T\] both"):
            mask_segments(x, x[:, 1:], 0.5, mask=MASK, seeds=seeds)
        with pytest.raises(ValueError, match=r"share is 1\.5; expected the share of segments to mask"):
            mask_segments(x, x, 1.5, mask=MASK, seeds=seeds)
        with pytest.raises(ValueError, match="a row has 1 segments; expected 2 or more"):
            mask_segments(x, np.zeros_like(x), 0.5, mask=MASK, seeds=seeds)
        with pytest.raises(ValueError, match=r"predicted has shape \[1, 4\] and codes \[1, 4\]; expected one"):
            nce(torch.zeros(1, 4), torch.zeros(1, 4))
