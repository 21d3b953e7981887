"""The cost of a decoded token by depth, against the products that decoding runs; and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spanformer.cli.main import main
from spanformer.core.shape import Shape
from spanformer.cost.depth import mean_cost, token_cost
from spanformer.depth import ACT, Confidence, Exits
from spanformer.model.config import AttentionConfig, DepthConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.linear import counted_products
from spanformer.model.lm import LM
from spanformer.train.run_events import model_shape

LAYERS = 4
SHAPE = Shape(
    layers=3, dim=8, heads=2, kv_heads=1, head_dim=4, feedforward=100, persistent=2, vocab=11, block=1, batch=1,
    max_span=9,
)  # fmt: skip


def make(depth: DepthConfig, **settings: Any) -> LM:
    torch.manual_seed(0)
    found: dict[str, Any] = {"kv_heads": 2} | settings
    lm = LM(
        ModelConfig(
            vocab=23, dim=32, layers=LAYERS, heads=4, attention=AttentionConfig(kind="full", max_span=12), depth=depth,
            position=PositionConfig(kind="rotary"), feedforward=FeedForwardConfig(kind="swiglu", dim=40), **found,
        )
    ).eval()  # fmt: skip
    for mechanism in lm.mechanisms():
        mechanism.backend = "banded"
    return lm


def counted(lm: LM) -> int:
    """Operations of the products that decoding one token runs, once the rings are full."""
    cache = lm.cache(1)
    lm.decode(torch.randint(23, (1, 20)), cache)
    with counted_products(), FlopCounterMode(display=False) as counter:
        lm.decode(torch.randint(23, (1, 1)), cache)
    return counter.get_total_flops()


@pytest.mark.parametrize("fixed", [1, 2, LAYERS])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("lazy", [False, True])
def test_token_cost_equals_counted_products(fixed: int, kv_heads: int, lazy: bool) -> None:
    """Lazy layers store nothing of a token that no deeper one follows."""
    lm = make(DepthConfig(kind="exits"), kv_heads=kv_heads)
    assert isinstance(lm.depth, Exits)
    lm.depth.fixed, lm.depth.lazy = fixed, lazy
    cost = token_cost(model_shape(lm, 1, 1), lm.distances(), 20, fixed)
    assert counted(lm) == cost.total - lazy * cost.skipped
    assert cost.skipped == (LAYERS - fixed) * 2 * 2 * 32 * 8 * kv_heads


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("check", ["softmax", "classifier"])
def test_checks_equal_counted_products(check: Literal["softmax", "classifier"], maps: bool) -> None:
    lm = make(DepthConfig(kind="exits", classifier="geometric", maps=maps))
    assert isinstance(lm.depth, Exits)
    lm.depth.lazy = False
    for threshold, depth in ((0.0, 1), (1.0, LAYERS)):
        lm.depth.confidence = Confidence(check, threshold)
        assert counted(lm) == token_cost(model_shape(lm, 1, 1), lm.distances(), 20, depth, check, maps).total


@pytest.mark.parametrize("bias", [20.0, -20.0])
def test_universal_stack_costs_as_its_steps(bias: float) -> None:
    lm = make(DepthConfig(kind="act", bias=bias), stack="universal")
    depth, halting = 1 if bias > 0 else LAYERS, 2 * 32
    want = token_cost(model_shape(lm, 1, 1), lm.distances(), 20, depth).total
    assert isinstance(lm.depth, ACT) and counted(lm) in (want, want + depth * halting)  # torch counts no mv
    plain = make(DepthConfig())
    assert sum(p.numel() for p in lm.blocks.parameters()) * LAYERS == sum(p.numel() for p in plain.blocks.parameters())


def test_attention_grows_until_the_reach() -> None:
    reach = [[1, 4], [9, 9], [2, 3]]
    for context, pairs in ((0, 6), (1, 1 + 2 + 2 + 2 + 2 + 2), (2, 1 + 3 + 3 + 3 + 2 + 3), (50, 28)):
        dense = 3 * 2 * (8 * 4 * 2 * 3 + 100)
        assert token_cost(SHAPE, reach, context, 3).layers == dense + 4 * 4 * (pairs + 3 * 2 * 2)


def test_mean_cost_weighs_depths() -> None:
    reach = [[4, 4]] * 3
    each = [token_cost(SHAPE, reach, 9, n, "saturation").total for n in (1, 2, 3)]
    assert mean_cost(SHAPE, reach, 9, [0.5, 0.25, 0.25], "saturation") == 0.5 * each[0] + 0.25 * (each[1] + each[2])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: token_cost(SHAPE, [[1, 1]] * 3, 4, 0), "depth is 0; expected 1 … 3"),
        (lambda: token_cost(SHAPE, [[1, 1]] * 3, 4, 4), "depth is 4; expected 1 … 3"),
        (lambda: token_cost(SHAPE, [[1, 1]] * 3, -1, 1), "context is -1; expected 0 or more"),
        (lambda: token_cost(SHAPE, [[1, 1]] * 2, 4, 1), "reach has 2 layers; expected 3"),
        (lambda: mean_cost(SHAPE, [[1, 1]] * 3, 4, [0.5, 0.4, 0.2]), "expected 3 shares that sum to 1"),
    ],
)
def test_bad_input_is_one_sentence(call, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()


def test_command_prints_costs_by_depth(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    main(["cost", "--model", str(root / "runs/universal.toml"), "--length", "100", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["blocks"] == 1 and found["layers"] == 6 == len(found["costs"])
    totals = [row["total"] for row in found["costs"]]
    assert totals == sorted(totals) and found["costs"][-1]["skipped"] == 0
    main(["cost", "--model", str(root / "runs/exits.toml"), "--length", "100", "--check", "softmax"])
    shown = capsys.readouterr().out
    assert "Decoding a token of" in shown and "100 %" in shown and "one block" not in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--check", "softmax"], "check is 'softmax' without a model"),
        (["--model", "runs/seq2seq.toml"], "is 'seq2seq'; expected 'lm'"),
    ],
)
def test_command_refuses_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["cost", *arguments])
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
