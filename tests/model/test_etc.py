"""The ETC encoder, its masked-token head, and the contrastive loss of whole sentences."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.data import mask_tokens
from spanformer.model.cpc import mask_sentences, nce, predict_sentences
from spanformer.model.etc import ETC

MASK = 0


def make(**options) -> ETC:
    torch.manual_seed(0)
    return ETC(20, 16, 2, 2, 3, **{"clip": 2, **options})


def text(b: int = 2, sentences: int = 3, words: int = 4, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 20, (b, sentences * words), generator=g)
    return x, torch.arange(sentences).repeat_interleave(words).expand_as(x), torch.zeros(b, sentences, dtype=torch.long)


class TestEncoder:
    def test_shapes_and_that_every_parameter_learns(self):
        for shared in (True, False):
            etc = make(shared=shared)
            long, top = etc(*text())
            assert long.shape == (2, 12, 16) and top.shape == (2, 3, 16)
            (etc.guess(long, text()[1], text()[0]).mean() + top.square().mean()).backward()
            lazy = [name for name, p in etc.named_parameters() if p.grad is None or not p.grad.abs().sum()]
            assert not lazy, lazy

    def test_projections_of_its_own_for_each_part_unless_shared(self):
        one, own = (dict(make(shared=shared).layers[0].named_parameters()) for shared in (True, False))
        assert sum("key" in name for name in one) == 1 and sum("key" in name for name in own) == 4
        assert sum("query" in name for name in one) == 1 and sum("query" in name for name in own) == 2
        # given the shared weights everywhere, both are the same function
        a, c = make(shared=True), make(shared=False)
        given = a.state_dict()
        c.load_state_dict({name: given[name if name in given else _shared(name)] for name in c.state_dict()})
        for u, v in zip(a(*text()), c(*text()), strict=True):
            assert torch.allclose(u, v, atol=1e-6)

    def test_padding_changes_nothing(self):
        etc = make().eval()
        x, segments, top = text()
        long, summary = etc(x, segments, top)
        padding = torch.zeros(2, 15, dtype=torch.bool)
        padding[:, 12:] = True
        global_padding = torch.tensor([[False] * 3 + [True]] * 2)
        more = F.pad(x, (0, 3), value=7), F.pad(segments, (0, 3), value=3), F.pad(top, (0, 1))
        padded = etc(*more, padding=padding, global_padding=global_padding)
        assert torch.allclose(padded.long[:, :12], long, atol=1e-5)
        assert torch.allclose(padded.top[:, :3], summary, atol=1e-5)

    def test_a_far_token_is_heard_through_the_global_ones_only(self):
        """Two layers of radius 3 reach 6 tokens; the first token reaches the last by l2g of what g2l took."""
        etc = make().eval()
        x, segments, top = text(b=1)
        changed = x.clone()
        changed[0, 0] = x[0, 0] % 19 + 1
        moved = (etc(x, segments, top).long - etc(changed, segments, top).long).abs().amax(2)[0]
        assert (moved > 1e-7).all()
        alone = torch.ones(1, 3, dtype=torch.bool)  # no global token is there
        moved = [etc(t, segments, top, global_padding=alone).long for t in (x, changed)]
        moved = (moved[0] - moved[1]).abs().amax(2)[0]
        assert (moved[:7] > 1e-7).all() and (moved[7:] == 0).all()

    def test_hard_summaries_of_one_layer_see_their_sentence_only(self):
        torch.manual_seed(0)
        etc = ETC(20, 16, 1, 2, 3, hard_g2l=True).eval()
        x, segments, top = text(b=1)
        changed = x.clone()
        changed[0, 0] = x[0, 0] % 19 + 1
        moved = (etc(x, segments, top).top - etc(changed, segments, top).top).abs().amax(2)[0]
        assert moved[0] > 1e-6 and (moved[1:] == 0).all()

    def test_masked_tokens_are_learned(self):
        """Each sentence repeats one word: a masked one is known from its neighbours."""
        torch.manual_seed(1)
        etc = make()
        optimizer = torch.optim.Adam(etc.parameters(), lr=1e-2)
        losses = []
        for step in range(60):
            g = torch.Generator().manual_seed(step)
            x = torch.randint(1, 20, (8, 3), generator=g).repeat_interleave(4, 1)
            hidden = mask_tokens(x.numpy(), 0.25, vocab=20, mask=MASK, seeds=[(step, row) for row in range(8)])
            seen, at, targets = (torch.from_numpy(a) for a in (hidden.x, hidden.at, hidden.y))
            _, segments, top = text(8)
            loss = etc.guess(etc(seen, segments, top).long, at, targets).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] > 2.5 and sum(losses[-10:]) / 10 < 1.6, losses

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"vocab": 0}, "vocab is 0, global_vocab 1 and layers 2; expected at least 1 each"),
            ({"dim": 15}, "dim is 15; expected a multiple of heads, 2"),
        ],
    )
    def test_bad_options_are_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            ETC(**{"vocab": 20, "dim": 16, "layers": 2, "heads": 2, "radius": 3, **options})

    def test_bad_inputs_are_refused(self):
        x, segments, top = text()
        with pytest.raises(ValueError, match=r"top has shape \[1, 3\] and dtype torch.int64; expected ids, one row"):
            make()(x, segments, top[:1])
        with pytest.raises(ValueError, match=r"at has shape \[2, 3\] and targets \[2, 4\]; expected \[2, N\] both"):
            make().guess(torch.zeros(2, 12, 16), x[:, :3], x[:, :4])
        with pytest.raises(ValueError, match="token 1 is outside the vocabulary of 1"):
            make()(x, segments, top + 1)


class TestContrastive:
    def test_picked_sentences_are_masked_and_set_apart(self):
        x, segments, _ = text(b=3, sentences=5)
        segments = segments.clone()
        segments[:, -2:] = -1  # of no sentence
        padding = torch.zeros_like(x, dtype=torch.bool)
        padding[0, :6] = True  # the first sentence, and half of the second
        masked = mask_sentences(x, segments, 0.4, MASK, padding=padding, generator=torch.Generator().manual_seed(2))
        expected, alone = x.clone(), []
        for row, sentence in zip(masked.rows.tolist(), masked.sentences.tolist(), strict=True):
            its = [i for i in range(20) if segments[row, i] == sentence and not padding[row, i]]
            assert its
            alone.append(x[row, its].tolist())
            expected[row, its] = MASK
        assert torch.equal(masked.x, expected) and 2 <= len(alone) < 13
        kept = [row[~hidden].tolist() for row, hidden in zip(masked.alone, masked.padding, strict=True)]
        assert kept == alone

    def test_a_share_of_all_and_never_fewer_than_two(self):
        x, segments, _ = text(b=40, sentences=10)
        g = torch.Generator().manual_seed(0)
        picked = len(mask_sentences(x, segments, 0.25, MASK, generator=g).rows)
        assert 70 <= picked <= 130
        for seed in range(5):
            g = torch.Generator().manual_seed(seed)
            assert len(mask_sentences(x[:1], segments[:1], 1e-9, MASK, generator=g).rows) == 2

    def test_the_loss_is_its_equation(self):
        g = torch.Generator().manual_seed(0)
        p, c = (torch.randn(5, 7, generator=g, dtype=torch.float64) for _ in range(2))
        expected = 0.0
        for s in range(5):
            scores = [float(p[s] @ c[t]) / math.sqrt(7) for t in range(5)]
            expected -= math.log(math.exp(scores[s]) / sum(map(math.exp, scores))) / 5
        assert float(nce(p, c)) == pytest.approx(expected, rel=1e-12)
        assert float(nce(torch.zeros(5, 7), c.float())) == pytest.approx(math.log(5))

    def test_the_loss_is_least_where_the_codes_are_matched(self):
        """Codes at equal angles; among guesses of the codes' length none is better than the codes themselves."""
        codes = 3 * F.normalize(torch.eye(6, dtype=torch.float64) - 1 / 6, dim=1)
        matched = nce(codes, codes)
        assert matched < nce(codes.roll(1, 0), codes)
        g = torch.Generator().manual_seed(0)
        for size in (1e-3, 0.1, 1.0, 10.0):
            for _ in range(20):
                other = codes + size * torch.randn(6, 6, generator=g, dtype=torch.float64)
                assert nce(3 * F.normalize(other, dim=1), codes) > matched

    def test_training_tells_sentences_apart(self):
        """A masked sentence has words of its own, known by the text's topic and by where it stands in it."""
        torch.manual_seed(0)
        topics, sentences, words = 4, 3, 2
        etc = ETC(1 + topics * sentences * words, 32, 2, 2, 4, clip=2)
        optimizer = torch.optim.Adam(etc.parameters(), lr=3e-3)
        _, segments, top = text(topics, sentences, 4)
        losses = []
        for step in range(60):
            g = torch.Generator().manual_seed(step)
            topic = torch.randperm(topics, generator=g)[:, None]
            x = 1 + (topic * sentences + segments) * words + torch.randint(words, segments.shape, generator=g)
            masked = mask_sentences(x, segments, 0.25, MASK, generator=g)
            loss = predict_sentences(etc, etc(masked.x, segments, top).top, masked, top)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item() / math.log(len(masked.rows)))  # 1: guesses that know nothing
        assert sum(losses[:10]) / 10 > 0.8 and sum(losses[-20:]) / 20 < 0.6, losses

    def test_bad_input_is_refused(self):
        x, segments, _ = text()
        with pytest.raises(ValueError, match=r"x has shape \[2, 12\] and segments \[2, 11\]; expected \[B, n\] both"):
            mask_sentences(x, segments[:, 1:], 0.5, MASK)
        with pytest.raises(ValueError, match=r"share is 1\.5; expected the share of sentences to mask"):
            mask_sentences(x, segments, 1.5, MASK)
        with pytest.raises(ValueError, match="the batch has 1 sentences; expected at least 2"):
            mask_sentences(x[:1], torch.zeros_like(x[:1]), 0.5, MASK)
        with pytest.raises(ValueError, match=r"predicted has shape \[1, 4\] and codes \[1, 4\]; expected one"):
            nce(torch.zeros(1, 4), torch.zeros(1, 4))


def _shared(name: str) -> str:
    for part in ("l2g", "g2g", "g2l"):
        for which in ("key", "value"):
            name = name.replace(f"{which}.{part}", f"{which}.l2l")
    return name.replace(".top.", ".long.")
