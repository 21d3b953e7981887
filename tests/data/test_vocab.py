"""Ids and back, and the same ids however the text was cut."""

from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanformer.data import BPE, Bytes, Chars, Vocab, Words, from_json
from spanformer.data.vocab import whole_words

TEXT = "the cat sat\non the  mat , naïve\n\n 東京 the\tend\r\nwith no newline"
LETTERS = st.text(st.sampled_from("ab'1!é東😀 \n\t\r\x1c\x85\u3000"), max_size=60)


def learned() -> dict[str, Vocab]:
    return {"byte": Bytes(), "char": Chars.learn([[TEXT]]), "word": Words.learn([[TEXT]]), "bpe": BPE.learn([[TEXT]])}


VOCABS = learned()
TRAINED = BPE.learn([["ab'b a'1!! \n\n  a\té東!\x1c! bb\u3000a 11 'ab\n" * 5]], 300)


def parts(text: str, size: int) -> list:
    return [text[i : i + size] for i in range(0, len(text), size)]


@pytest.mark.parametrize("kind", VOCABS)
def test_decode_inverts_encode(kind: str) -> None:
    vocab = VOCABS[kind]
    ids = vocab.encode(TEXT)
    assert ids.dtype == np.int64 and ids.ndim == 1 and ids.min() >= 0 and ids.max() < vocab.size
    same = {"word": "the cat sat\non the mat , naïve\n\n東京 the end\nwith no newline\n"}.get(kind, TEXT)
    assert vocab.decode(ids) == same
    assert np.array_equal(vocab.encode(TEXT.encode()), ids)
    assert vocab.encode("").shape == (0,) and vocab.decode([]) == ""


@pytest.mark.parametrize("kind", VOCABS)
def test_json_keeps_everything(kind: str) -> None:
    saved = json.loads(json.dumps(VOCABS[kind].to_json()))
    vocab = from_json(saved)
    assert type(vocab) is type(VOCABS[kind]) and vocab.size == VOCABS[kind].size
    assert np.array_equal(vocab.encode(TEXT), VOCABS[kind].encode(TEXT))
    assert vocab.to_json() == saved


@settings(deadline=None, max_examples=200)
@given(LETTERS, st.integers(1, 7))
def test_ids_do_not_depend_on_the_parts(text: str, size: int) -> None:
    assert "".join(whole_words(parts(text, size))) == text
    for vocab in (Chars("ab1"), Words(["ab", "a", "<eos>", "<unk>"]), TRAINED):
        whole = vocab.encode(text)
        cut = np.concatenate([whole[:0], *vocab.stream(parts(text, size))])
        assert np.array_equal(whole, cut), vocab.kind
    direct = TRAINED._tokenizer.encode(text).ids
    assert TRAINED.encode(text).tolist() == direct
    assert TRAINED.decode(direct) == text


@settings(deadline=None, max_examples=100)
@given(st.lists(LETTERS, max_size=4), st.integers(1, 7))
def test_words_are_those_of_every_line(documents: list[str], size: int) -> None:
    """Against the obvious way: all lines at once, a count, and a sort."""
    lines = [[*line.split(), "<eos>"] for text in documents for line in text.removesuffix("\n").split("\n") if text]
    flat = [word for line in lines for word in line]
    order = sorted(Counter(flat), key=lambda word: (-flat.count(word), flat.index(word)))
    vocab = Words.learn([parts(text, size) for text in documents])
    assert vocab.words == [*order, "<unk>"]
    encoded = [i for text in documents for i in vocab.encode(text)]
    assert [vocab.words[i] for i in encoded] == flat


def test_rare_words_and_characters_become_unknown() -> None:
    text = "b b b a a c\n"
    words = Words.learn([[text]], 3)
    assert words.words == ["b", "a", "<unk>"]
    assert words.encode(text).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert Words.learn([["<unk> <unk> a a a b\n"]], 3).words == ["a", "<unk>", "b"]
    assert Words.learn([["a a a b b <unk>\n"]], 2).words == ["a", "<unk>"]
    chars = Chars.learn([["zzyyyx"]], 3)
    assert chars.chars == "yz" and chars.encode("xyzé").tolist() == [2, 0, 1, 2]
    assert chars.decode([2, 0]) == "\ufffdy"


def test_bytes_encode_any_file() -> None:
    assert Bytes().encode(bytes(range(256))).tolist() == list(range(256))
    assert Bytes().decode([0x61, 0xFF]) == "a\ufffd"


def test_smallest_dtype_that_fits() -> None:
    for size, name in ((256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "int32")):
        assert Words([*map(str, range(size - 1)), "<unk>"]).dtype.name == name
    assert Chars("".join(map(chr, range(255)))).dtype.name == "uint8"


def test_bpe_learns_the_same_however_the_text_is_cut() -> None:
    text = "a cat and a hat, and that cat's hat\n\n" * 20
    assert BPE.learn([[text]], 280).to_json() == BPE.learn([parts(text, 7)], 280).to_json()
    assert BPE.learn([[text]], 260).size == 260


SAVED_WRONG = {
    '{"kind": "morse"} is no saved vocabulary; expected the result of to_json': {"kind": "morse"},
    "{} is no saved": {},
    r"\[\] is no saved": [],
    '{"kind": "char"} is no saved': {"kind": "char"},
    '"words": "abc"} is no saved': {"kind": "word", "words": "abc"},
    '"chars": "aa"} is no saved': {"kind": "char", "chars": "aa"},
    "… is no saved": {"kind": "word", "words": ["<unk>", "<unk>", "a", "b", "c"]},
    "tokenizers cannot load": {"kind": "bpe", "tokenizer": {"version": "1.0"}},
}


@pytest.mark.parametrize("message", SAVED_WRONG)
def test_invalid_saved_vocabulary_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(SAVED_WRONG[message])


def test_words_without_unk_refuse_an_unknown_word() -> None:
    words = from_json({"kind": "word", "words": ["a", "b", "<eos>"]})
    assert words.encode("b a\n").tolist() == [1, 0, 2] and words.unknown is None
    for read in (words.stream, words.prompt):
        with pytest.raises(ValueError, match=r"lacks the word 'c'; expected words of the training text$"):
            list(read(["a c\n"]))


def test_without_the_package_bpe_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers; pip install 'spanformer\[bpe\]'"):
        BPE.learn([["a"]])
