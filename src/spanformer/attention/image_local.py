"""Local attention over images, in blocks of queries that share one block of keys.

Image Transformer (Parmar et al., 2018), https://arxiv.org/abs/1802.05751, section 3.2

    1-D   query block b of l_q tokens sees itself and the l_m tokens before it             O(n·(l_q + l_m)) pairs
    2-D   query block of h × w pixels sees itself, h_m lines above and w_m columns beside   O(n·(h + h_m)·(w + 2·w_m))

and of those only earlier pixels (j ≤ i) if causal. In 2-D the image is generated block by block: `order`
returns that order, and its inverse restores raster order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanformer.attention.pattern import Block, Grid
from spanformer.attention.patterned import Patterned
from spanformer.kinds import HeadSpec


class ImageLocal1D(Patterned):
    """block: l_q tokens of a query block. memory: l_m tokens before it (and as many after it if not causal)."""

    def __init__(self, heads: int, block: int, memory: int, *, causal: bool = True) -> None:
        super().__init__(heads, Block(block, memory, 0 if causal else memory), causal=causal)

    @classmethod
    def build(cls, spec: HeadSpec) -> ImageLocal1D:
        return cls(spec.heads, spec.p.block, spec.p.memory, causal=spec.causal)


class ImageLocal2D(Patterned):
    """width: pixels per line. block: (h, w) of a query block. memory: (h_m, w_m) beyond it. Tokens come in `order`."""

    def __init__(
        self, heads: int, width: int, block: tuple[int, int], memory: tuple[int, int], *, causal: bool = True
    ) -> None:
        super().__init__(heads, Grid(width, *block, *memory), causal=causal)

    @classmethod
    def build(cls, spec: HeadSpec) -> ImageLocal2D:
        p = spec.p
        return cls(spec.heads, p.width, (p.high, p.wide), (p.above, p.beside), causal=spec.causal)


def order(width: int, height: int, block: tuple[int, int]) -> Tensor:
    """[width · height] the pixel (in raster order) of each token: x[:, order(…)] puts an image's pixels in the
    order of its blocks."""
    high, wide = block
    if width % wide or height % high:
        raise ValueError(f"height is {height} and width {width}; expected multiples of the block, {high} × {wide}")
    pixels = torch.arange(width * height).view(height // high, high, width // wide, wide)
    return pixels.transpose(1, 2).flatten()
