"""Models of fixed patterns: every kind by name, trained a step, and read in segments and with a cache as in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.kinds.notation import parse_layer
from spanformer.model.lm import LM
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text

LAYERS = [
    "dilated(6, 3)", "strided(9)", "strided_heads(9)", "fixed(12, 2)", "fixed_heads(12, 2)", "image_1d(16, 10)",
    "image_2d(12, 2, 3, 2, 1)", "blockwise(3, 8)", "big_bird(8, 3, 1, 2)", "Window(9) | Global([0, 5])",
    "2 Random(2, seed=1, size=8) | Window(4) + 2 adaptive_span", "2 strided(7) + 1 fixed(8, 1) + 1 window(5)",
]  # fmt: skip


def model(layer: str) -> LM:
    return make(replace(SMALL, attention=replace(SMALL.attention, kind=layer, max_span=64, stack=())))


@pytest.mark.parametrize("layer", LAYERS)
def test_segments_and_cache_equal_one_pass(layer: str) -> None:
    lm, x = model(layer), text(2, 131)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, range(37, 131, 37)), whole, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(from_cache(lm, x, [100, *[1] * 5, 26]), whole, rtol=1e-9, atol=1e-9)


def test_bad_pattern_is_named() -> None:
    with pytest.raises(ValueError, match=r"'Windows\(3\)'.* is not a pattern; expected one of Full, Window"):
        model("Windows(3)")


@pytest.mark.parametrize(
    "kind, said",
    [
        ("window(0)", "window in .* is 0"),
        ("dilated(0, 2)", "window in .* is 0"),
        ("dilated(4, 0)", "step in .* is 0"),
        ("strided(0)", "step in .* is 0"),
        ("fixed(0, 1)", "size in .* is 0"),
        ("fixed(8, 0)", "last is 0"),
        ("image_1d(0, 8)", "block in .* is 0"),
        ("blockwise(0, 8)", "blocks in .* is 0"),
        ("blockwise(2, 0)", "size in .* is 0"),
        ("sink_window(0, 2)", "window in .* is 0"),
        ("longformer(0)", "window in .* is 0"),
        ("longformer(8, 0, 0)", "dilation in .* is 0"),
    ],
)
def test_zero_argument_is_not_the_default(kind: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model(kind)


BLOCKS = {"fixed": "size", "fixed_heads": "size", "strided": "step", "strided_heads": "step", "big_bird": "block"}


@pytest.mark.parametrize("kind, name", BLOCKS.items())
def test_block_that_the_limit_would_cut_is_refused(kind: str, name: str) -> None:
    assert max(model(f"{kind}(64)").distances()[0]) == 64
    with pytest.raises(ValueError, match=f"^{name} is 65 and max_span 64; expected a block within max_span$"):
        model(f"{kind}(65)")


def test_pattern_may_begin_with_a_bracket() -> None:
    layers = [
        parse_layer(f"{count}{text}", 4) for text in ("(Window(4) | Every(8)) & Window(20)",) for count in ("", "4 ")
    ]
    assert all(part.kind == "pattern" and part.heads == 4 for (part,) in layers)
    assert model("(Window(4) | Every(8)) & Window(20)")(text(1, 30)).logits.shape[1] == 30
