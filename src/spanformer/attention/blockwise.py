"""Blockwise attention: each block of queries sees one block of keys, chosen by the head's permutation.

Blockwise Self-Attention for Long Document Understanding (BlockBERT; Qiu et al., 2019), https://arxiv.org/abs/1911.02972

    a_ij ∝ exp(s_ij)   for π_h(⌊i·n/N⌋) = ⌊j·n/N⌋                                        O(N²/n) pairs

The paper's permutations are shifts: a head with the identity sees near keys, the others far ones. By default half the
heads have the identity and the others shifts by one, two, … blocks in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanformer.attention.pattern import Blockwise as Permuted
from spanformer.attention.patterned import Patterned
from spanformer.kinds import HeadSpec

MOST_BLOCKS = 4096


class Blockwise(Patterned):
    """blocks: n, the number of blocks in the text. permutations: π of each head. size: tokens per block instead, if
    the length of the text is not known beforehand; the permutation then applies to every n blocks.

    A causal head sees nothing in a block whose permutation points to the future; its rows there are zero."""

    def __init__(
        self,
        heads: int,
        blocks: int,
        *,
        permutations: Sequence[Sequence[int]] | None = None,
        size: int | None = None,
        causal: bool = False,
    ) -> None:
        if not 1 <= blocks <= MOST_BLOCKS:
            raise ValueError(f"blocks is {blocks}; expected 1 … {MOST_BLOCKS:,}")
        if permutations is None:
            permutations = [
                shifted(blocks, 0 if h < (heads + 1) // 2 else h - (heads + 1) // 2 + 1) for h in range(heads)
            ]
        super().__init__(heads, [Permuted(tuple(p), size) for p in permutations], causal=causal)

    @classmethod
    def build(cls, spec: HeadSpec) -> Blockwise:
        return cls(spec.heads, spec.p.blocks, size=spec.p.size, causal=spec.causal)


def shifted(blocks: int, by: int) -> list[int]:
    """The permutation that sends block b to b − by, modulo the number of blocks."""
    return [(b - by) % blocks for b in range(blocks)]
