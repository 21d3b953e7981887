"""Sizes that no tensor holds, and texts of no token, are refused by name before anything is built or computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.attention import AdaptiveSpan, Sinks, Window
from spanformer.infer import generate
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.seq2seq import Seq2Seq
from support.small_models import SMALL

HUGE = 10**30
REFUSED = {
    "AdaptiveSpan": (
        lambda: AdaptiveSpan(2, HUGE),
        f"max_span is {HUGE}; expected 1 … 2,147,483,648 tokens",
    ),
    "Window, huge": (
        lambda: Window(2, HUGE),
        f"window is {HUGE}; expected a whole number from 1 to 2,147,483,648",
    ),
    "Window, a half": (lambda: Window(2, 1.5), "window is 1.5; expected a whole number from 1 to 2,147,483,648"),  # pyright: ignore
    "Sinks, a half": (
        lambda: Sinks(Window(2, 4), sink_tokens=1.5),
        "sink_tokens is 1.5; expected a whole number from 0 to 2,147,483,648",
    ),  # pyright: ignore
    "Sinks, huge": (
        lambda: Sinks(Window(2, 4), sink_tokens=HUGE),
        f"sink_tokens is {HUGE}; expected a whole number from 0 to 2,147,483,648",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_size_of_an_attention_names_the_argument(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_text_without_tokens_is_refused_by_name(shape: tuple[int, int]) -> None:
    none, some = torch.zeros(shape, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    said = (
        rf"has shape \[{shape[0]}, {shape[1]}\] and dtype torch.int64; expected token ids \[B, T\], B and T at least 1"
    )
    with pytest.raises(ValueError, match="x " + said):
        LM(SMALL)(none)
    with pytest.raises(ValueError, match="x " + said):
        Encoder(replace(SMALL, kind="encoder"))(none)
    pairs = Seq2Seq(replace(SMALL, kind="seq2seq"))
    with pytest.raises(ValueError, match="x " + said):
        pairs(some, none)
    with pytest.raises(ValueError, match="source has "):
        pairs(none, some)


@pytest.mark.parametrize("name, value", [("beams", 1.5), ("lookup", HUGE), ("chunk", 1.5), ("max_tokens", 0.5)])
def test_count_of_a_generation_names_the_argument(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; expected [01] "):
        generate(LM(SMALL), torch.tensor([1]), **{name: value})  # pyright: ignore


@pytest.mark.parametrize("name", ["batch", "slack"])
def test_cache_of_a_negative_or_broken_size_names_the_argument(name: str) -> None:
    for value in (-1, 1.5):
        with pytest.raises(ValueError, match=f"{name} is {value}; expected a whole number of at least 0"):
            LM(SMALL).cache(**{"batch": 1, name: value})  # pyright: ignore
