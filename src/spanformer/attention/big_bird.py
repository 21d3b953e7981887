"""BigBird: a window, a few global tokens and a few random ones, all in blocks.

Big Bird: Transformers for Longer Sequences (Zaheer et al., 2020), https://arxiv.org/abs/2007.14062

    a_ij ∝ exp(s_ij)   where block(j) is one of the w around block(i), one of the g first, one of r drawn for block(i),
                       or block(i) itself is one of the g first                          O(n·(w + g + r)·size) pairs

Random blocks never repeat blocks of the window or global ones. Causal samples come from earlier blocks and depend on
the block's number only, so they stay the same as the text grows; see pattern.Random.
"""

from __future__ import annotations

from spanformer.attention.pattern import Block, Global, Random
from spanformer.attention.patterned import Patterned, check_limit
from spanformer.kinds import HeadSpec


class BigBird(Patterned):
    """block: tokens per block. window, tokens and random count blocks; window is odd, with the token's block in the
    middle. Every head has its own random blocks. Run files take their defaults from kinds/big_bird.py."""

    def __init__(
        self,
        heads: int,
        block: int = 16,
        *,
        window: int = 3,
        tokens: int = 1,
        random: int = 2,
        seed: int = 0,
        causal: bool = False,
        longest: int | None = None,
    ) -> None:
        if window < 1 or window % 2 == 0:
            raise ValueError(
                f"window is {window}; expected an odd number of blocks, with the token's block in the middle"
            )
        side = window // 2
        near = Block(block, side * block, side * block) | Global(tokens * block)
        drawn = [Random(random, seed=seed + h, size=block, near=side, first=tokens) for h in range(heads)]
        super().__init__(heads, [near | draw for draw in drawn], causal=causal, longest=longest, size=block)

    @classmethod
    def build(cls, spec: HeadSpec) -> BigBird:
        p = spec.p
        check_limit("block", p.block, spec.section.max_span)
        return cls(
            spec.heads, p.block, window=p.window, tokens=p.tokens, random=p.random, causal=spec.causal,
            longest=spec.section.max_span,
        )  # fmt: skip
