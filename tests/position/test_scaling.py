"""Rotary angles stretched for longer texts: the definitions, and the implementation in transformers."""

from __future__ import annotations

import math
import re

import pytest
import torch

from spanformer.attention import View
from spanformer.position import Rotary


def plain(d: int, base: float) -> torch.Tensor:
    return torch.tensor([base ** (-2 * c / d) for c in range(d // 2)], dtype=torch.float64)


def test_linear_equals_scaled_positions() -> None:
    k, at = torch.randn(1, 2, 9, 8), torch.arange(0, 36, 4)
    slow, rotary = Rotary(8, scaling="linear", factor=4.0), Rotary(8)
    torch.testing.assert_close(slow.speeds(), plain(8, 10000.0) / 4)
    torch.testing.assert_close(slow.rotate(k, at), rotary.rotate(k, at // 4))


def test_ntk_keeps_the_fastest_and_makes_the_slowest_linear() -> None:
    speeds, before = Rotary(16, scaling="ntk", factor=8.0).speeds(), plain(16, 10000.0)
    torch.testing.assert_close(speeds[0], before[0])
    torch.testing.assert_close(speeds[-1], before[-1] / 8)
    torch.testing.assert_close(speeds, plain(16, 10000.0 * 8 ** (16 / 14)))


@pytest.mark.parametrize(
    ("d", "base", "factor", "trained"),
    [(64, 10000.0, 4.0, 2048), (128, 10000.0, 16.0, 4096), (64, 500000.0, 2.5, 8192), (16, 10000.0, 8.0, 256),
     (32, 10000.0, 4.0, 7)],
)  # fmt: skip
def test_yarn_is_that_of_transformers(d: int, base: float, factor: float, trained: int) -> None:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    parameters = {
        "rope_type": "yarn",
        "rope_theta": base,
        "factor": factor,
        "original_max_position_embeddings": trained,
    }
    config = LlamaConfig(
        hidden_size=4 * d, num_attention_heads=4, head_dim=d, max_position_embeddings=int(trained * factor),
        rope_parameters=parameters,
    )  # fmt: skip
    speeds, length = rope.ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rotary = Rotary(d, base, scaling="yarn", factor=factor, trained=trained)
    torch.testing.assert_close(rotary.speeds().float(), speeds, rtol=1e-5, atol=1e-12)
    assert rotary.length == pytest.approx(length)
    x = torch.randn(1, 1, 5, d)
    at = torch.arange(trained, trained + 5)
    angle = at[:, None] * torch.cat([speeds, speeds])
    half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
    torch.testing.assert_close(
        rotary.rotate(x, at), (x * angle.cos() + half * angle.sin()) * length, rtol=1e-3, atol=3e-3
    )


def test_yarn_sharpens_scores_by_the_square_of_its_length() -> None:
    rotary = Rotary(8, scaling="yarn", factor=4.0, trained=64)
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    q, k = rotary.encode(x, x, View())
    assert float((q * k).sum()) == pytest.approx(float((x * x).sum()) * (0.1 * math.log(4) + 1) ** 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": "log"}, "scaling is 'log'; expected one of none, linear, ntk, yarn"),
        ({"factor": 2.0}, "factor is 2.0 with scaling 'none'; expected at least 1, and exactly 1 without scaling"),
        (
            {"scaling": "linear", "factor": 0.5},
            "factor is 0.5 with scaling 'linear'; expected at least 1, and exactly 1 without scaling",
        ),
        (
            {"scaling": "yarn", "factor": 2.0},
            "trained is 0 with scaling 'yarn'; expected the training length with scaling 'yarn', and none otherwise",
        ),
        (
            {"trained": 9},
            "trained is 9 with scaling 'none'; expected the training length with scaling 'yarn', and none otherwise",
        ),
        (
            {"scaling": "yarn", "trained": 9, "base": 1.0},
            "base is 1.0; yarn needs a base above 1, so that some pairs rotate slower than others",
        ),
        (
            {"scaling": "ntk", "factor": 2.0, "head_dim": 2},
            "head_dim is 2; ntk scaling needs at least 4: a fast pair and a slow one",
        ),
    ],
)
def test_rotary_scaling_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Rotary(**{"head_dim": 8, **options})
