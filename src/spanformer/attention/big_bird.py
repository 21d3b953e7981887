"""BigBird: a window, a few global tokens and a few random ones, all in blocks.

Big Bird: Transformers for Longer Sequences (Zaheer et al., 2020), https://arxiv.org/abs/2007.14062

    a_ij ∝ exp(s_ij)   where block(j) is one of the w around block(i), one of the g first, one of r drawn for block(i),
                       or block(i) itself is one of the g first                          O(n·(w + g + r)·size) pairs

The drawn blocks are none of the window's and none of the global ones. Causal draws come from earlier blocks and depend
on the block's number alone, so that a growing text keeps what it saw; see pattern.Random.
"""

from __future__ import annotations

from spanformer.attention.pattern import Block, Global, Random
from spanformer.attention.patterned import Patterned


class BigBird(Patterned):
    """block: tokens of one. window, tokens and random count blocks; the window is odd, its middle the token's own.
    Every head draws for itself."""

    def __init__(
        self,
        heads: int,
        block: int = 64,
        *,
        window: int = 3,
        tokens: int = 2,
        random: int = 3,
        seed: int = 0,
        causal: bool = False,
        longest: int | None = None,
    ) -> None:
        if window < 1 or window % 2 == 0:
            raise ValueError(
                f"window is {window}; expected an odd number of blocks, with the token's own in the middle"
            )
        side = window // 2
        near = Block(block, side * block, side * block) | Global(tokens * block)
        drawn = [Random(random, seed=seed + h, size=block, near=side, first=tokens) for h in range(heads)]
        super().__init__(heads, [near | draw for draw in drawn], causal=causal, longest=longest, size=block)
