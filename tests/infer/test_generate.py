"""Tokens from the cache are those of the model reading the whole text anew for each of them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from spanformer import Sampling, generate
from spanformer.data import Chars
from spanformer.infer import generate_batch
from spanformer.infer.prompt import matters, read_prompts
from spanformer.infer.sampling import draw, penalise

GREEDY = Sampling(0)
LETTERS = Chars("abcdefghij")  # and an eleventh id, for what is unknown


def ids(pieces, row=0):
    return [piece.id for piece in pieces if piece.row == row]


def text(pieces, row=0):
    return "".join(piece.text for piece in pieces if piece.row == row)


@torch.no_grad()
def predict(lm, known):
    return lm(torch.tensor([known])).logits[:, -1]


def greedy(lm, prompt, count):
    known = list(prompt)
    for _ in range(count):
        known.append(int(predict(lm, known).argmax()))
    return known[len(prompt) :]


@pytest.fixture
def reads(monkeypatch, lm):
    """The shapes of all that a model of this class reads."""
    shapes, read = [], type(lm).decode

    def watched(self, x, cache, *, lengths=None, logits="all"):
        shapes.append(tuple(x.shape))
        return read(self, x, cache, lengths=lengths, logits=logits)

    monkeypatch.setattr(type(lm), "decode", watched)
    return shapes


@pytest.mark.parametrize("length", [1, 2, 9, 63, 130])
def test_greedy_takes_the_likeliest_token_after_the_whole_text(any_lm, tokens, length):
    prompt = tokens(length)
    assert ids(generate(any_lm, prompt, sampling=GREEDY, max_tokens=12)) == greedy(any_lm, prompt, 12)


def test_drawn_tokens_follow_the_seed_and_the_whole_text(lm, tokens):
    known, random = tokens(70), torch.Generator().manual_seed(5)
    sampling = Sampling(0.9, repetition=1.3, repetition_window=4)
    pieces = ids(generate(lm, known, sampling=sampling, seed=5, max_tokens=20))
    for token in pieces:
        seen = torch.zeros(1, 11, dtype=torch.bool)
        seen[0, known[-4:]] = True
        logits = penalise(predict(lm, known), seen, 1.3) / 0.9
        known.append(int(draw(logits, torch.rand(1, generator=random, dtype=torch.float64))))
        assert known[-1] == token


def test_seeds(lm):
    def made(seed):
        return ids(generate(lm, [1, 2], seed=seed, max_tokens=40))

    before = torch.random.get_rng_state()
    assert made(3) == made(3) != made(4)
    assert made(None) != made(None)
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's random numbers change


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_text_does_not_depend_on_chunk_size(lm, tokens, reads, chunk):
    prompt = np.array(tokens(90))
    expected = ids(generate(lm, prompt, sampling=GREEDY, max_tokens=8))
    reads.clear()
    parts = iter(np.split(prompt, [0, 1, 30, 31]))
    assert ids(generate(lm, parts, sampling=GREEDY, max_tokens=8, chunk=chunk)) == expected
    least = min(90, matters(lm))
    assert sum(width for _, width in reads[:-7]) == least and max(width for _, width in reads) <= max(chunk, 1)


def test_only_the_receptive_field_of_a_prompt_is_read(any_lm, tokens):
    """Exact in float64, and one token less would not be: what is left out has no way to the end."""
    most = matters(any_lm)
    prompt = tokens(most + 40)
    embedded = any_lm.embedding(torch.tensor([prompt])).detach().requires_grad_()
    any_lm.embedding.forward = lambda x: embedded
    any_lm(torch.tensor([prompt])).logits[0, -1].square().sum().backward()
    reached = embedded.grad[0].abs().sum(-1)
    assert not reached[:40].any() and reached[-1] > 0
    del any_lm.embedding.forward
    whole, tail = predict(any_lm, prompt), any_lm.cache(1)
    found = read_prompts(any_lm, [np.array(prompt[-most:])], tail, 16, None)
    assert torch.allclose(found, whole, rtol=0, atol=1e-10 * whole.abs().max())


def test_progress_reports_tokens_read(lm, tokens):
    told = []
    list(generate(lm, tokens(14), max_tokens=1, chunk=4, on_read=lambda *done: told.append(done)))
    assert told == [(4, 14), (8, 14), (12, 14), (14, 14)]


def test_reading_grows_with_neither_prompt_nor_text(lm, tokens, reads):
    list(generate(lm, tokens(5000), max_tokens=30, chunk=16))
    assert set(reads[-29:]) == {(1, 1)} and sum(width for _, width in reads) < matters(lm) + 30


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.5), Sampling(0, repetition=1.2), Sampling(0.7, top_k=3)])
def test_lookup_changes_the_steps_and_not_the_tokens(any_lm, tokens, sampling):
    for guessed, dtype in ((1, torch.float64), (8, torch.float32)):
        prompt = (tokens(6) * 12)[: 60 + guessed]
        any_lm.to(dtype)
        plain = ids(generate(any_lm, prompt, sampling=sampling, seed=2, max_tokens=40))
        assert ids(generate(any_lm, prompt, sampling=sampling, seed=2, max_tokens=40, lookup=guessed)) == plain


def test_lookup_takes_fewer_steps_where_the_text_repeats_itself(lm, tokens, reads):
    prompt = tokens(20)
    plain = list(generate(lm, prompt, sampling=GREEDY, max_tokens=120))
    assert len(reads) == 120
    reads.clear()
    assert list(generate(lm, prompt, sampling=GREEDY, max_tokens=120, lookup=8)) == plain
    assert len(reads) < 80 and max(width for _, width in reads[1:]) == 9


@pytest.mark.slow
def test_lookup_leaves_the_cache_at_the_last_token(lm, tokens):
    for most in range(101, 104):
        cache, prompt = lm.cache(1, slack=8), tokens(20)
        made = ids(generate(lm, prompt, sampling=GREEDY, max_tokens=most, lookup=8, cache=cache))
        assert cache.seen.tolist() == [min(20, matters(lm)) + most - 1]
        more = ids(generate(lm, made[-1:], sampling=GREEDY, max_tokens=9, cache=cache))
        assert made + more == greedy(lm, prompt, most + 9)


def test_batch_of_prompts_of_different_lengths(any_lm, tokens):
    prompts = [tokens(length) for length in (1, 50, 7, 130, 64)]
    sampling = Sampling(0.8, repetition=1.1)
    for chunk in (16, 512):
        pieces = list(generate_batch(any_lm, prompts, sampling=sampling, seed=10, max_tokens=15, chunk=chunk))
        assert [piece.row for piece in pieces] == list(range(5)) * 15
        for row, prompt in enumerate(prompts):
            alone = generate(any_lm, prompt, sampling=sampling, seed=10 + row, max_tokens=15)
            assert ids(pieces, row) == ids(alone)


def test_rows_of_a_batch_end_independently(lm, reads):
    prompts = ["abc", "jjj", "aaaaaaaaaaaaaaaaaaaaaaaaaaa", "h"]
    pieces = list(generate_batch(lm, prompts, vocab=LETTERS, stop=["c", "ed"], seed=0, max_tokens=40))
    rows = [rows for rows, _ in reads]
    lengths = [len(ids(pieces, row)) for row in range(4)]
    assert len(set(lengths)) > 2 and sum(rows) == sum(lengths)  # the prompt is the first read of each
    for row, prompt in enumerate(prompts):
        alone = list(generate(lm, prompt, vocab=LETTERS, stop=["c", "ed"], seed=row, max_tokens=40))
        assert ids(alone) == ids(pieces, row) and text(alone) == text(pieces, row)


def test_text_stops_before_a_stop_string(lm):
    whole = text(generate(lm, "abc", vocab=LETTERS, seed=0, max_tokens=80))
    assert len(whole) == 80
    stop = whole[50:53]
    pieces = list(generate(lm, "abc", vocab=LETTERS, seed=0, max_tokens=80, stop=[stop, "nowhere"]))
    assert text(pieces) == whole[: whole.index(stop)] and len(pieces) == whole.index(stop) + 3


def test_held_back_text_is_written_at_the_end(lm):
    for beams in (1, 2):
        whole = text(generate(lm, "abc", vocab=LETTERS, seed=0, max_tokens=30, beams=beams))
        ends = whole[-2:] + "never"
        assert text(generate(lm, "abc", vocab=LETTERS, seed=0, max_tokens=30, beams=beams, stop=[ends])) == whole


def test_only_tokens_of_the_vocabulary_are_generated(lm):
    few = Chars("ab")
    assert set(ids(generate(lm, "ab", vocab=few, max_tokens=60, sampling=Sampling(5.0)))) == {0, 1, 2}
    assert set(ids(generate(lm, "ab", vocab=few, max_tokens=20, beams=2))) <= {0, 1, 2}


def test_cache_is_continued(any_lm, tokens):
    first, second = tokens(40), tokens(5)
    cache = any_lm.cache(1)
    made = ids(generate(any_lm, first, sampling=GREEDY, max_tokens=6, cache=cache))
    more = ids(generate(any_lm, [made[-1], *second], sampling=GREEDY, max_tokens=6, cache=cache))
    assert more == greedy(any_lm, [*first, *made, *second], 6)


def log_probability(lm, prompt, continuation):
    with torch.no_grad():
        logits = lm(torch.tensor([[*prompt, *continuation]])).logits[0].log_softmax(-1)
    return sum(float(logits[len(prompt) - 1 + n, token]) for n, token in enumerate(continuation))


def test_wide_beam_search_finds_the_likeliest_text(lm):
    few = Chars("ab")  # and unknown: three tokens
    prompt = [0, 1, 1, 0]

    found = ids(generate(lm, "abba", vocab=few, beams=81, max_tokens=4))

    def of_three(continuation):
        known, total = list(prompt), 0.0
        for token in continuation:
            total += float(predict(lm, known)[0, :3].log_softmax(-1)[token])
            known.append(token)
        return total

    assert tuple(found) == max(itertools.product(range(3), repeat=4), key=of_three)


def search_slowly(lm, prompt, beams, count, ends):
    """The definition, reading everything anew."""
    live, ended = [((), 0.0)], []
    for _ in range(count):
        longer = []
        for known, score in live:
            chances = predict(lm, [*prompt, *known])[0].log_softmax(-1).tolist()
            longer += [((*known, token), score + chance) for token, chance in enumerate(chances)]
        best = sorted(longer, key=lambda one: -one[1])[: 2 * beams]
        ended += [one for one in best if ends(one[0])]
        ended = sorted(ended, key=lambda one: -one[1] / len(one[0]))[:beams]
        live = [one for one in best if not ends(one[0])][:beams]
        means = [[score / len(made) for made, score in group] for group in (live, ended)]
        if not live or (len(ended) == beams and max(means[0]) <= min(means[1])):
            break
    return list(max([*ended, *live], key=lambda one: one[1] / len(one[0]))[0])


@pytest.mark.parametrize("beams", [2, 3, 5])
@pytest.mark.parametrize("stop", [(), ("c",), ("ab", "j")])
def test_beams_follow_their_definition(any_lm, tokens, beams, stop):
    prompt = [token % 10 for token in tokens(30)]

    def ends(known):
        return any(one in LETTERS.decode(known) for one in stop)

    written = LETTERS.decode(prompt)
    found = list(generate(any_lm, written, vocab=LETTERS, beams=beams, max_tokens=10, stop=stop))
    expected = search_slowly(any_lm, prompt, beams, 10, ends)
    assert ids(found) == expected
    cut = min((LETTERS.decode(expected).find(one) for one in stop if one in LETTERS.decode(expected)), default=None)
    assert text(found) == LETTERS.decode(expected)[:cut]


def test_beam_search_is_at_least_as_likely_as_greedy(lm, tokens):
    better = 0
    for _ in range(5):
        prompt = tokens(20)
        found = ids(generate(lm, prompt, beams=8, max_tokens=8))
        gain = log_probability(lm, prompt, found) - log_probability(lm, prompt, greedy(lm, prompt, 8))
        assert gain > -1e-9
        better += gain > 1e-6
    assert better


def test_beam_search_yields_a_token_once_all_beams_agree(lm, tokens, reads):
    """Not only at the end: the first pieces come before the last steps."""
    pieces = generate(lm, tokens(20), beams=2, max_tokens=200)
    first = next(pieces)
    steps = len(reads)
    assert steps < 150 and len([first, *pieces]) == 200 and len(reads) > steps


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"prompt": []}, "the prompt is empty; expected at least one token"),
        ({"prompt": ""}, "the prompt is empty; expected at least one token"),
        ({"prompt": [3, 11]}, "token 2 of the prompt is 11; expected ids of the vocabulary, 0 … 10"),
        ({"max_tokens": 0}, "max_tokens is 0; expected 1 or more"),
        ({"chunk": 0}, "chunk is 0; expected 1 or more"),
        ({"seed": -1}, "seed is -1; expected 0 … 2⁶³ − 1"),
        ({"beams": 0}, "beams is 0; expected 1 … 1,024"),
        ({"lookup": -1}, "lookup is -1; expected 0 … 1,024"),
        ({"beams": 2, "sampling": Sampling(0.5)},
         "beams is 2, and beam search does not sample; omit sampling, or use 1 beam"),
        ({"beams": 2, "lookup": 4}, "beams is 2 and lookup is 4; expected one of the two"),
        ({"stop": [""]}, "stop contains an empty string, which would stop at once; expected non-empty strings"),
        ({"stop": "a"}, "stop is the string 'a'; expected a list of strings, such as ['a']"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_read(lm, reads, wrong, said):
    with pytest.raises(ValueError) as error:
        generate(lm, **{"prompt": [1, 2], "vocab": LETTERS, **wrong})
    assert str(error.value) == said and not reads


def test_bad_batches_are_refused(lm):
    for prompts, beams, lookup, said in [
        ([], 1, 0, "prompts is empty; expected one or more"),
        ([[1], []], 1, 0, "prompt 2 is empty; expected at least one token"),
        ([[1], [2]], 2, 0, "beams takes one prompt at a time; got 2"),
        ([[1], [2], [3]], 1, 2, "lookup takes one prompt at a time; got 3"),
    ]:
        with pytest.raises(ValueError) as error:
            generate_batch(lm, prompts, beams=beams, lookup=lookup)
        assert str(error.value) == said


def test_cache_that_does_not_fit_is_refused(lm):
    with pytest.raises(ValueError, match=r"^the KV cache has 2 rows; expected one for each prompt, 1$"):
        generate(lm, [1], cache=lm.cache(2))
    with pytest.raises(ValueError) as error:
        generate(lm, [1], cache=lm.cache(1, slack=3), lookup=4)
    assert str(error.value) == ("lookup is 4, but the KV cache has a slack of 3 tokens; expected a slack of 4 or more")


def test_nan_weights_are_refused(lm):
    with torch.no_grad():
        lm.head.weight[3] = math.nan
    with pytest.raises(ValueError, match=r"predictions are not finite numbers; its weights are damaged"):
        list(generate(lm, [1, 2]))
