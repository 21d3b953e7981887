"""Scores of a text that comes in parts: every token once, whatever is read at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spanformer.infer import score


@torch.no_grad()
def slowly(lm, tokens):
    """Every token after the whole text before it."""
    found = [math.log(lm.config.vocab)]
    for n in range(1, len(tokens)):
        found.append(-float(lm(torch.tensor([tokens[:n]])).logits[0, -1].log_softmax(-1)[tokens[n]]))
    return found


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_each_token_is_scored_after_all_before_it(any_lm, tokens, chunk):
    text = tokens(40)
    parts = np.split(np.array(text, np.uint8), [0, 1, 3, 30])
    found = list(score(any_lm, iter(parts), chunk=chunk))
    assert np.concatenate([part.ids for part in found]).tolist() == text
    assert np.allclose(np.concatenate([part.nats for part in found]), slowly(any_lm, text), rtol=0, atol=1e-9)
    assert max(len(part.ids) for part in found) <= chunk


def test_short_texts(lm):
    assert list(score(lm, [])) == []
    (only,) = score(lm, [np.array([4])])
    assert only.ids.tolist() == [4] and only.nats.tolist() == [math.log(11)]


def test_bad_input_is_refused(lm):
    with pytest.raises(ValueError, match=r"^chunk is 0; expected 1 or more$"):
        score(lm, [], chunk=0)
    with pytest.raises(ValueError, match=r"^token 3 of the text is 11; expected ids of the vocabulary, 0 … 10$"):
        list(score(lm, iter([np.array([1, 2]), np.array([11])])))
