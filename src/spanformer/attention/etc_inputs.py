"""The inputs of ETC's attention: a long input, a few global tokens, and the global token of each long one.

Shapes: B batch, H heads, n long tokens, m global ones, D head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

Two = tuple[Tensor, Tensor]


class Projected(NamedTuple):
    """Queries of both inputs, and keys and values for each part. Parts may share them."""

    q_long: Tensor
    """[B, H, n, D]"""
    q_global: Tensor
    """[B, H, m, D]"""
    l2l: Two
    """[B, H, n, D] each, like those of g2l"""
    l2g: Two
    """[B, H, m, D] each, like those of g2g"""
    g2g: Two
    g2l: Two


class Structure(NamedTuple):
    """The global token of each long token, and padding."""

    segments: Tensor
    """[B, n] integers: the index of each token's global token; −1: none"""
    long_padding: Tensor | None = None
    """[B, n] bool, True for padding"""
    global_padding: Tensor | None = None
    """[B, m] bool"""


def hide(padding: Tensor | None) -> Tensor | None:
    """[B, 1, T], −inf for padding."""
    if padding is None:
        return None
    return torch.zeros(padding.shape, device=padding.device).masked_fill(padding, -math.inf)[:, None]


def check_segments(ids: Tensor, b: int, n: int) -> None:
    if ids.shape != (b, n) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"segments has shape {list(ids.shape)} and dtype {ids.dtype}; expected [{b}, {n}] integers, the index of "
            "each token's global token, −1 for none"
        )


def check_inputs(given: Projected, structure: Structure) -> None:
    (b, _, n, _), m = given.q_long.shape, given.q_global.shape[2]
    ids = structure.segments
    check_segments(ids, b, n)
    for name, padding, length in (
        ("long_padding", structure.long_padding, n),
        ("global_padding", structure.global_padding, m),
    ):
        if padding is not None and (padding.shape != (b, length) or padding.dtype != torch.bool):
            raise ValueError(
                f"{name} has shape {list(padding.shape)} and dtype {padding.dtype}; expected [{b}, {length}] of "
                "torch.bool, True for padding"
            )
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        lowest, highest = (int(i) for i in ids.aminmax())
        if lowest < -1 or highest >= m:
            wrong = lowest if lowest < -1 else highest
            raise ValueError(f"segments holds {wrong}; expected −1 … {m - 1}, as there are {m} global tokens")
