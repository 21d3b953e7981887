"""Ids to text one at a time, and prompts: the same text, never half a character, nothing unknown."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanformer.data import BPE, Bytes, Chars, Vocab, Words

TEXT = "the cat sat\non the  mat , naïve\n\n 東京 the\tend 😀\nwith no newline"
VOCABS: dict[str, Vocab] = {
    "byte": Bytes(), "char": Chars.learn([[TEXT]]), "word": Words.learn([[TEXT]]), "bpe": BPE.learn([[TEXT]])
}  # fmt: skip


@pytest.mark.parametrize("kind", VOCABS)
def test_pieces_are_whole_characters_and_join_to_the_text(kind):
    vocab = VOCABS[kind]
    ids = vocab.encode(TEXT).tolist()
    decoder = vocab.detokenizer()
    pieces = [decoder.add(token) for token in ids]
    assert "".join(pieces) + decoder.finish() == vocab.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(list(filter(None, pieces))) > 10


@pytest.mark.parametrize("kind", VOCABS)
def test_pieces_follow_what_came_before(kind):
    vocab = VOCABS[kind]
    ids = vocab.encode(TEXT).tolist()
    for cut in (1, 5, 7):
        before = vocab.decode(ids[:cut])
        decoder = vocab.detokenizer(ids[max(0, cut - 4) : cut])
        assert before + "".join(map(decoder.add, ids[cut:])) + decoder.finish() == vocab.decode(ids)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=30))
def test_invalid_bytes_decode_as_in_one_piece(data):
    decoder = Bytes().detokenizer()
    assert "".join(map(decoder.add, data)) + decoder.finish() == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", VOCABS)
def test_any_ids_are_decoded_with_a_short_buffer(kind):
    vocab = VOCABS[kind]
    decoder, silent = vocab.detokenizer(), 0
    for token in np.random.default_rng(0).integers(0, vocab.size, 300).tolist():
        silent = 0 if decoder.add(token) else silent + 1
        assert silent <= 3


@pytest.mark.parametrize("kind", VOCABS)
@pytest.mark.parametrize("text", ["the cat", "the cat\n", ""])
def test_prompt_is_the_text_with_an_open_end(kind, text):
    vocab = VOCABS[kind]
    whole = vocab.encode(text).tolist()
    expected = whole[:-1] if kind == "word" and text == "the cat" else whole
    found = np.concatenate([np.empty(0, np.int64), *vocab.prompt([text[:4], text[4:]])])
    assert found.tolist() == expected


def test_prompt_with_unknown_token_is_refused():
    with pytest.raises(ValueError) as error:
        list(VOCABS["char"].prompt(["the cat ", "sat Q"]))
    assert str(error.value) == (
        "the vocabulary lacks the character 'Q' (U+0051), at position 13 of the prompt; expected characters of the "
        "training text"
    )
    with pytest.raises(ValueError) as error:
        list(VOCABS["word"].prompt(["the dog sat"]))
    assert str(error.value) == (
        "the vocabulary lacks the word 'dog'; expected words of the training text, or <unk> in its place"
    )
    assert len(np.concatenate(list(VOCABS["word"].prompt(["the <unk> sat"])))) == 3


def test_bytes_keep_command_line_bytes_that_are_not_utf8():
    said = b"a\xff\xc3".decode("utf-8", "surrogateescape")
    assert np.concatenate(list(Bytes().prompt([said, b"b"]))).tolist() == [0x61, 0xFF, 0xC3, 0x62]


def test_bpe_refuses_command_line_bytes_that_are_not_utf8():
    with pytest.raises(ValueError, match=r"^the prompt is not UTF-8 at its character 2; convert it$"):
        list(VOCABS["bpe"].prompt(["a\udcff"]))


def test_tokenizer_from_elsewhere_that_strips_the_first_space():
    """Its pieces keep their spaces when they are decoded one at a time."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.decoder = tokenizers.decoders.Metaspace()
    made.train_from_iterator(["to be or not to be"], tokenizers.trainers.BpeTrainer(show_progress=False))
    vocab = BPE(json.loads(made.to_str()))
    ids = vocab.encode("to be or not to be").tolist()
    decoder = vocab.detokenizer(ids[:2])
    assert vocab.decode(ids[:2]) + "".join(map(decoder.add, ids[2:])) == "to be or not to be"
