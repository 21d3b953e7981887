"""One price in operations for spans and depth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spanformer.depth import ACT, Exits
from spanformer.model.config import AttentionConfig, DepthConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.price import priced

EXITS = DepthConfig(kind="exits", classifier="geometric", oracle="likelihood")


def config(kind: str = "dynamic_span", depth: DepthConfig = EXITS, price: float = 0.5, **more: object) -> RunConfig:
    attention = AttentionConfig(kind=kind, max_span=64, ramp=8, init=0.25)
    model = ModelConfig(vocab=30, dim=16, layers=4, heads=2, attention=attention, depth=depth, **more)  # pyright: ignore
    return RunConfig(model=model, train=TrainConfig(flop_price=price, block=16))


DENSE = 2 * (4 * 16 * 16 + 3 * 16 * 64)  # projections and a feed-forward of 3 matrices
KEYS_AND_VALUES = 2 * 2 * 16 * 16  # that a skipped layer projects as well


@pytest.mark.parametrize("kind", ["dynamic_span", "adaptive_span"])
def test_the_spans_penalty_is_what_their_pairs_cost(kind: str) -> None:
    torch.manual_seed(1)
    lm = LM(priced(config(kind, DepthConfig())).model).double()
    penalty = lm(torch.randint(30, (2, 9))).penalty
    operations = sum(4 * 8 * span for layer in lm.spans() for span in layer if span is not None)
    assert operations > 1000
    torch.testing.assert_close(float(penalty.detach()), 0.5e-6 * operations, rtol=1e-5, atol=0.0)


def test_a_layer_costs_what_it_computes() -> None:
    exits = LM(priced(config()).model).depth
    assert isinstance(exits, Exits) and exits.price == pytest.approx(0.5e-6 * (DENSE - KEYS_AND_VALUES))
    fixed = LM(priced(config("window(32)")).model).depth  # a window's keys are paid with the layer
    assert isinstance(fixed, Exits)
    assert fixed.price == pytest.approx(0.5e-6 * (DENSE - KEYS_AND_VALUES + 4 * 16 * 32))


def test_ponder_time_is_paid_by_the_step() -> None:
    act = LM(priced(config(depth=DepthConfig(kind="act"), stack="universal")).model).depth
    assert isinstance(act, ACT) and act.cost == pytest.approx(0.5e-6 * (DENSE - KEYS_AND_VALUES))


def test_no_price_changes_nothing_and_it_is_stable() -> None:
    plain = config(price=0.0)
    assert priced(plain) is plain
    once = priced(config())
    assert priced(once) == once and once.model.depth.price != plain.model.depth.price


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (config("1 window(8) + 1 adaptive_span"), "mixes learned spans with other heads"),
        (config(depth=DepthConfig(kind="exits", classifier="geometric")), "oracle 'correctness'; expected classifier"),
        (config(depth=replace(EXITS, classifier="calm")), "the exits have classifier 'calm'"),
        (RunConfig(model=ModelConfig(kind="encoder"), train=TrainConfig(flop_price=2)), "model.kind is 'encoder'"),
    ],
)  # fmt: skip
def test_bad_combinations_are_refused(run: RunConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"train.flop_price is .*{sentence}"):
        priced(run)


def test_a_negative_price_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.flop_price is -1; expected a finite number, 0 or more"):
        TrainConfig(flop_price=-1)
