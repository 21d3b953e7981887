"""A layer whose keys are its queries projects no keys."""

from __future__ import annotations

import pytest
import torch

from spanformer import LM
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig


@pytest.mark.parametrize(
    "kind, projected",
    [("lsh(8, 4, 2)", 0), ("routing(8, 4)", 0), ("window(8)", 1), ("2 window(8) + 2 lsh(8, 4, 2)", 1)],
)
def test_keys_are_projected_where_they_are_read(kind: str, projected: int) -> None:
    model = ModelConfig(
        vocab=31, dim=32, layers=1, heads=4, attention=AttentionConfig(kind=kind), position=PositionConfig(kind="none")
    )
    lm, calls = LM(model), []
    lm.layers()[0].attention.key.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randint(31, (2, 12))
    found = lm(x, targets=x)
    found.nll.mean().backward()
    assert len(calls) == projected
    lm.eval()
    with torch.no_grad():
        lm.decode(x, lm.cache(2))
    assert len(calls) == 2 * projected
