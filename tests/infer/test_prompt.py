"""Prompts of any kind and length as ids, with all that is wrong with them said."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spanformer.data import Bytes
from spanformer.infer.prompt import last_tokens, parts_of
from spanformer.infer.score import in_chunks


@pytest.mark.parametrize("most", [1, 2, 7, 1000])
def test_last_tokens_of_a_stream(most):
    draws = np.random.default_rng(0)
    parts = [np.arange(n, n + length) for n, length in enumerate(draws.integers(0, 9, 40))]
    found = last_tokens(iter(parts), most)
    assert found.dtype == np.int64 and found.tolist() == np.concatenate(parts)[-most:].tolist()
    assert last_tokens([], most).shape == (0,)


def test_long_stream_is_not_held():
    made = []  # how many parts are alive at once shows in what they keep

    class Part(np.ndarray):
        def __del__(self):
            made.append(-1)

    def stream():
        for _ in range(100):
            made.append(1)
            yield np.zeros(50, np.int64).view(Part)
            assert sum(made) < 40

    last_tokens(stream(), 120)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_same_tokens_in_equal_chunks(size):
    parts = [np.arange(n, dtype=np.uint8) for n in (0, 1, 5, 0, 20, 3)]
    chunks = list(in_chunks(parts, size))
    assert np.array_equal(np.concatenate(chunks), np.concatenate(parts)) and chunks[0].dtype == np.int64
    assert [len(chunk) for chunk in chunks[:-1]] == [size] * (len(chunks) - 1) and 0 < len(chunks[-1]) <= size


def ids(prompt, vocab=None, limit=256):
    return np.concatenate([np.empty(0, np.int64), *parts_of(prompt, vocab, limit)]).tolist()


@pytest.mark.parametrize(
    "prompt",
    [[97, 98], (97, 98), np.array([97, 98], np.uint8), torch.tensor([97, 98]), iter([np.array([97]), np.array([98])])],
)
def test_ids_of_every_kind(prompt):
    assert ids(prompt) == [97, 98]


def test_text_becomes_ids_by_its_vocabulary():
    assert ids("ab", Bytes()) == [97, 98]
    assert ids("", Bytes()) == ids([]) == ids(torch.zeros(0, dtype=torch.int64)) == []


@pytest.mark.parametrize(
    "prompt, said",
    [
        ("ab", "the prompt is a text, but vocab is None; pass vocab, or the ids of its tokens"),
        ([1, 2, 300], "token 3 of the prompt is 300; expected ids of the vocabulary, 0 … 255"),
        ([1, -1], "token 2 of the prompt is -1; expected ids of the vocabulary, 0 … 255"),
        (iter([np.array([1, 2]), np.array([3, 256])]),
         "token 4 of the prompt is 256; expected ids of the vocabulary, 0 … 255"),
        ([1.5], "the prompt has shape [1] and dtype float64; expected token ids [T]"),
        (torch.zeros(1, 2, dtype=torch.int64),
         "the prompt has shape [1, 2] and dtype int64; expected token ids [T]"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused(prompt, said):
    with pytest.raises(ValueError) as error:
        ids(prompt)
    assert str(error.value) == said
