"""Reading with a cache gives what one forward pass over the whole text gives, for all that a model can be made of."""

from __future__ import annotations

import pytest
import torch

from small_models import CONFIGS, make, text
from spanformer.model.lm import LM

PIECES = [[127], [64] + [1] * 30 + [33], [1] * 60 + [67], [3, 1, 90] + [1] * 33]


def read_in(lm: LM, x: torch.Tensor, pieces: list[int], **options) -> torch.Tensor:
    cache = lm.cache(len(x), **options)
    return torch.cat([lm.read(piece, cache) for piece in x.split(pieces, 1)], 1)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pieces", PIECES, ids=["at once", "mixed", "steps first", "steps last"])
def test_equals_one_forward_pass(name: str, pieces: list[int]) -> None:
    lm, x = make(CONFIGS[name]), text(2, 127)
    assert torch.allclose(read_in(lm, x, pieces), lm(x).logits, rtol=1e-9, atol=1e-9)
