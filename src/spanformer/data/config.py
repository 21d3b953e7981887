"""The text to read and its tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from spanformer.core.paths import expand_home

Tokens = Literal["byte", "char", "word", "bpe", "pixel"]


@dataclass(frozen=True)
class DataConfig:
    source: str = "stdlib"
    """a named corpus (stdlib, numbers, enwik8, text8, wikitext-2, wikitext-103), or a file, a folder or a glob of your
    own; stdlib is the source of Python's standard library, numbers has pairs of digits and words for a seq2seq model;
    or a task for a language model, such as recall(pairs=8, distance=256) (also copy, duplicate, needle, chase,
    repeat, reverse), or facts(every=1000, distance=2000), words with facts to remember. With tokens pixel: digits
    (8 × 8 images, in scikit-learn), or a folder of PNG files of one size"""
    tokens: Tokens = "byte"
    """type of token; pixel: the source is images, and a token is the value of a pixel"""
    copy: Annotated[str, tyro.conf.arg(name="from")] = ""
    """copy of the named corpus on disk (plain, .gz, .zip, .tar.gz or a folder), to use instead of a download"""
    vocab: int = 0
    """size of the vocabulary: keep the most frequent tokens, the rest become <unk>; 0: all (for bpe: 8192)"""
    tokenizer: str = ""
    """bpe only: JSON file of the package tokenizers to use instead of training a tokenizer"""
    valid: float = 0.05
    """share of the text for validation, where the source has no splits of its own"""
    test: float = 0.05
    """share of the text for testing, where the source has no splits of its own"""
    limit: int = 0
    """bytes to use for training, from the start, and at most a tenth as many for valid and test; 0: all"""
    cache: str = ""
    """folder for downloads and prepared tokens; by default $SPANFORMER_CACHE, or ~/.cache/spanformer"""

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source is empty; expected a named corpus, a file, a folder (. is the current) or a glob")
        if self.tokens not in get_args(Tokens):
            raise ValueError(f"tokens is {self.tokens!r}; expected one of {', '.join(get_args(Tokens))}")
        for name in ("valid", "test"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a share of the text, between 0 and 1")
        if self.valid + self.test >= 1:
            raise ValueError(f"valid + test is {self.valid + self.test:g}, which leaves no text to train on")
        if self.limit < 0:
            raise ValueError(f"limit is {self.limit}; expected a number of bytes, or 0 for all")
        least = {"byte": 0, "char": 2, "word": 2, "bpe": 256, "pixel": 0}[self.tokens]
        if self.vocab and self.tokens == "byte":
            raise ValueError(f"vocab is {self.vocab}; expected 0, since there are always 256 byte tokens")
        if self.vocab and self.tokens == "pixel":
            raise ValueError(f"vocab is {self.vocab}; expected 0, since the tokens of images are their levels")
        if self.vocab and self.vocab < least:
            raise ValueError(f"vocab is {self.vocab}; expected at least {least} for {self.tokens} tokens, or 0")
        if self.tokenizer and self.tokens != "bpe":
            raise ValueError(f"tokenizer is {self.tokenizer!r}, but tokens is {self.tokens!r}; expected tokens 'bpe'")
        if self.tokenizer and self.vocab:
            raise ValueError(f"vocab is {self.vocab}, but the tokenizer has its own vocabulary; omit one of them")

    def cache_folder(self) -> Path:
        return expand_home(self.cache or os.environ.get("SPANFORMER_CACHE") or "~/.cache/spanformer", "cache")
