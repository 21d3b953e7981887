"""The settings of the data: what they refuse, and how the command line spells them."""

from __future__ import annotations

import re

import pytest
import tyro

from spanformer.data import SOURCES, DataConfig

WRONG = {
    "source is empty; expected a named corpus, a file, a folder (. is the current) or a glob": {"source": ""},
    "tokens is 'letters'; expected one of byte, char, word, bpe": {"tokens": "letters"},
    "valid is 0; expected a share of the text, between 0 and 1": {"valid": 0},
    "test is nan; expected a share": {"test": float("nan")},
    "valid + test is 1.1, which leaves no text to train on": {"valid": 0.5, "test": 0.6},
    "limit is -1; expected a number of bytes, or 0 for all": {"limit": -1},
    "vocab is 300; expected 0, since there are always 256 byte tokens": {"vocab": 300},
    "vocab is 1; expected at least 2 for word tokens, or 0": {"vocab": 1, "tokens": "word"},
    "vocab is -5; expected at least 2 for char tokens, or 0": {"vocab": -5, "tokens": "char"},
    "vocab is 255; expected at least 256 for bpe tokens, or 0": {"vocab": 255, "tokens": "bpe"},
    "tokenizer is 'a.json', but tokens is 'byte'; expected tokens 'bpe'": {"tokenizer": "a.json"},
    "the tokenizer has its own vocabulary; omit one of them": {"tokenizer": "a", "tokens": "bpe", "vocab": 999},
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_settings_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(**WRONG[message])


def test_copy_is_called_from_on_the_command_line() -> None:
    config = tyro.cli(DataConfig, args=["--source", "enwik8", "--from", "a.gz", "--tokens", "char"])
    assert config == DataConfig("enwik8", "char", copy="a.gz")


def test_help_names_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(DataConfig, args=["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in SOURCES) and "--from" in text and "--copy" not in text
