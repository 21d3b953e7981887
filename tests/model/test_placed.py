"""A mechanism whose rule depends on where its keys stand: read whole, in segments and with a cache alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.attention import Attention, View
from spanformer.model.block import Block
from spanformer.model.lm import LM
from spanformer.ops import BlockIndex, Rule
from support.reading import by_segments, from_cache
from support.small_models import SMALL, make, text


class Thirds(Attention):
    """Sees itself, and every third token of the text, counted from its beginning, among the last few."""

    def __init__(self, heads: int, context: list[int]) -> None:
        super().__init__()
        self.heads, self.back, self.needs = heads, context, "positions"

    def rule_needs(self):
        return self.needs

    def rule(self, view: View) -> Rule:
        assert view.x is not None
        length = view.length or view.x.shape[1]
        at = view.start + torch.arange(length)
        mask = (at[None] % 3 == 0) | (at[None] == at[:, None])
        return Rule(self.heads, reach=[n + 1 for n in self.back], blocks=BlockIndex.from_dense(mask, 8))

    def context_length(self) -> list[int]:
        return self.back


def model(kv_heads: int) -> LM:
    lm = make(replace(SMALL, kv_heads=kv_heads))
    for block in lm.blocks:
        assert isinstance(block, Block)
        block.attention.mechanism = Thirds(4, [5, 31, 31, 130])
    return lm


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_segments_and_cache_equal_one_pass(kv_heads: int) -> None:
    lm, x = model(kv_heads), text(2, 211)
    whole = lm(x).logits
    torch.testing.assert_close(by_segments(lm, x, range(37, 211, 37)), whole, rtol=1e-9, atol=1e-9)
    for sizes in ([211], [100, *[1] * 50, 61]):
        torch.testing.assert_close(from_cache(lm, x, sizes), whole, rtol=1e-9, atol=1e-9)


def test_cache_rows_at_different_positions() -> None:
    lm, x = model(4), text(2, 60)
    cache = lm.cache(2)
    lm.decode(x[:, :40], cache, lengths=torch.tensor([40, 23]))
    more = torch.stack([x[0, 40:50], x[1, 23:33]])
    read = lm.decode(more, cache)
    for row, end in ((0, 50), (1, 33)):
        torch.testing.assert_close(read[row], lm(x[row : row + 1, :end]).logits[0, -10:], rtol=1e-9, atol=1e-9)  # pyright: ignore


def test_mechanism_that_needs_hidden_states_has_no_cache() -> None:
    lm = model(4)
    for mechanism in lm.mechanisms():
        mechanism.needs = "states"
    with pytest.raises(ValueError, match="Thirds needs the hidden states of its keys, which a KV cache does not hold"):
        lm.decode(text(1, 5), lm.cache(1))
