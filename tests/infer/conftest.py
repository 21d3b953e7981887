"""Small models whose heads forget soon, so that short texts reach beyond what they see."""

from __future__ import annotations

import pytest
import torch

from spanformer import LM, ModelConfig
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, PositionConfig

VOCAB = 11
KINDS: dict[str, ModelConfig] = {
    "adaptive_span": ModelConfig(VOCAB, 16, 2, 2, attention=AttentionConfig(max_span=24, ramp=3.0, init=0.2)),
    "mixed": ModelConfig(
        VOCAB, 16, 2, 4, kv_heads=2, position=PositionConfig("alibi"),
        attention=AttentionConfig(max_span=16, stack=("window(5)", "2 window(3) + 2 full")),
    ),
    "dynamic_span": ModelConfig(VOCAB, 16, 2, 2, attention=AttentionConfig("dynamic_span", max_span=16, ramp=2.0)),
    "original": ModelConfig(
        VOCAB, 16, 2, 2, paper_compat=True, order="post", norm="layer", position=PositionConfig("table"),
        feedforward=FeedForwardConfig("relu"), attention=AttentionConfig(max_span=16, ramp=2.0, init=0.3),
    ),
    "persistent": ModelConfig(
        VOCAB, 16, 2, 2, persistent=4, feedforward=FeedForwardConfig("none"), embedding=EmbeddingConfig(tied=True),
        attention=AttentionConfig("window", window=6),
    ),
}  # fmt: skip


def make(config: ModelConfig, seed: int = 0) -> LM:
    torch.manual_seed(seed)
    lm = LM(config).double().eval()
    with torch.no_grad():  # predictions that are far from even, so that no two tokens are as likely
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    return lm


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take longer than these models do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=KINDS)
def any_lm(request) -> LM:
    return make(KINDS[request.param])


@pytest.fixture
def lm() -> LM:
    return make(KINDS["adaptive_span"])


@pytest.fixture
def tokens():
    """A function from a length to this many ids."""
    random = torch.Generator().manual_seed(7)
    return lambda length: torch.randint(VOCAB, (length,), generator=random).tolist()
