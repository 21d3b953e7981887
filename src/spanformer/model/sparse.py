"""Models' heads of fixed patterns, from the numbers of a run file. None looks back further than `max_span`."""

from __future__ import annotations

from collections.abc import Callable

from spanformer.attention import (
    Attention,
    BigBird,
    Blockwise,
    DilatedWindow,
    FixedSparse,
    ImageLocal1D,
    ImageLocal2D,
    Patterned,
    StridedSparse,
)
from spanformer.attention.pattern import parse
from spanformer.model.config import ModelConfig
from spanformer.model.kinds import PATTERN, HeadKind


def _pattern(config: ModelConfig, part: HeadKind) -> Attention:
    return Patterned(part.heads, parse(part.text), causal=config.causal, longest=config.attention.max_span)


def _dilated(config: ModelConfig, part: HeadKind) -> Attention:
    window = part.number("window", config.attention.window)
    return DilatedWindow(part.heads, window, part.number("step"), causal=config.causal)


def _strided(use: str) -> Callable[[ModelConfig, HeadKind], Attention]:
    def make(config: ModelConfig, part: HeadKind) -> Attention:
        far = config.attention.max_span
        return StridedSparse(part.heads, part.number("step"), use=use, causal=config.causal, longest=far)

    return make


def _fixed(use: str) -> Callable[[ModelConfig, HeadKind], Attention]:
    def make(config: ModelConfig, part: HeadKind) -> Attention:
        size, last = part.number("size"), part.number("last")
        return FixedSparse(part.heads, size, last, use=use, causal=config.causal, longest=config.attention.max_span)

    return make


def _image_1d(config: ModelConfig, part: HeadKind) -> Attention:
    return ImageLocal1D(part.heads, part.number("block"), part.number("memory"), causal=config.causal)


def _image_2d(config: ModelConfig, part: HeadKind) -> Attention:
    width, high, wide, above, beside = map(part.number, part.numbers)
    return ImageLocal2D(part.heads, width, (high, wide), (above, beside), causal=config.causal)


def _blockwise(config: ModelConfig, part: HeadKind) -> Attention:
    return Blockwise(part.heads, part.number("blocks"), size=part.number("size"), causal=config.causal)


def _big_bird(config: ModelConfig, part: HeadKind) -> Attention:
    block, window, tokens, random = map(part.number, part.numbers)
    return BigBird(
        part.heads, block, window=window, tokens=tokens, random=random, causal=config.causal,
        longest=config.attention.max_span,
    )  # fmt: skip


SPARSE_MAKERS: dict[str, Callable[[ModelConfig, HeadKind], Attention]] = {
    PATTERN: _pattern,
    "dilated": _dilated,
    "strided": _strided("merged"),
    "strided_heads": _strided("heads"),
    "fixed": _fixed("merged"),
    "fixed_heads": _fixed("heads"),
    "image_1d": _image_1d,
    "image_2d": _image_2d,
    "blockwise": _blockwise,
    "big_bird": _big_bird,
}
