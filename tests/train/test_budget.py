"""A run with a budget: attention costs its share of full attention from the first step to the last."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from spanformer.attention import AdaptiveSpan
from spanformer.core.events import NoteEvent
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.model.span_budget import SpanBudget, make_budget
from spanformer.report.events import read_run
from spanformer.report.run_pictures import run_pictures
from spanformer.train.run import train
from support.tiny_runs import tiny

KINDS = ["adaptive_span", "dynamic_span", "sink_span", "1 window(8) + 1 adaptive_span"]


def alone(t: torch.Tensor) -> torch.Tensor:
    """The mean over one process."""
    return t


def model(kind: str = "adaptive_span", budget: float = 0.5, *, kv_heads: int = 0, tied: bool = False) -> LM:
    a = AttentionConfig(kind=kind, max_span=64, ramp=4, budget=budget, tied=tied)
    return LM(ModelConfig(vocab=30, dim=16, layers=2, heads=4, kv_heads=kv_heads, attention=a))


def digits(folder: Path) -> Path:
    """A second kind of text: numbers, each after its square."""
    draw, path = random.Random(1), folder / "digits.txt"
    path.write_text("".join(f"{n * n}={n}\n" for n in (draw.randrange(1000) for _ in range(700))))
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["words", "digits"])
def test_run_ends_within_five_percent_of_its_budget(tmp_path: Path, kind: str, text: str) -> None:
    changes = {"model.attention.kind": kind, "model.attention.budget": 0.4, "model.attention.max_span": 64,
               "train.steps": 40, "train.save_every": 0, "train.eval_every": 0, "optim.span_lr": 0.05}  # fmt: skip
    if text == "digits":
        changes["data.source"] = str(digits(tmp_path))
    notes: list[str] = []
    train(tiny(tmp_path, changes), watch=lambda e: notes.append(e.text) if isinstance(e, NoteEvent) else None)
    run = read_run(tmp_path / "run")
    shares = [row.attention_share for row in run.steps]
    assert all(abs(share / 0.4 - 1) < 0.05 for share in shares[-5:]), shares
    assert {row.budget for row in run.steps} == {0.4} and run.steps[-1].price > 0 and not notes
    by_hand = sum(min(n, 64) for layer in run.steps[-1].reach for n in layer) / (4 * 64)
    assert shares[-1] == pytest.approx(by_hand)
    spread = [z for layer in run.steps[-1].spans for z in layer if z == z]
    assert max(spread) > 1.2 * min(spread), "tokens move between heads"
    (picture,) = [each for each in run_pictures(run) if each.name == "budget"]
    assert f"{shares[-1]:.2%} of the distances" in picture.sentence and "its budget of 40.00%" in picture.sentence


@pytest.mark.parametrize("kind", ["adaptive_span", "dynamic_span"])
@pytest.mark.parametrize("tied", [False, True])
def test_slopes_are_those_of_the_loss_by_the_average_span(kind: str, tied: bool) -> None:
    lm = model(kind, kv_heads=2, tied=tied).double()
    x = torch.randint(30, (2, 40), generator=torch.Generator().manual_seed(0))
    budget = SpanBudget(lm, 0.5, alone)
    budget._set_price(1e-3)

    def loss(penalty: bool) -> torch.Tensor:
        found = lm(x, targets=x)
        assert found.nll is not None
        return found.nll.mean() + (found.penalty if penalty else 0)

    loss(True).backward()
    slopes = budget.slopes()
    assert slopes is not None and len(slopes) == 2 * (2 if tied else 4)
    first = budget.parts[0]
    by = first.ratio if isinstance(first, AdaptiveSpan) else first.bias
    for n in range(first.kv_heads):  # a move of the parameter that makes the average span a token longer, times eps
        values = []
        for eps in (1e-5, -1e-5):
            with torch.no_grad():
                before = by[n].clone()
                share = 0.5 if kind == "adaptive_span" else float(by[n].sigmoid())
                by[n] += eps / 64 if kind == "adaptive_span" else eps / (64 * share * (1 - share))
                values.append(float(loss(False)))
                by[n] = before
        assert float(slopes[n]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-3, abs=1e-9)


def test_windows_are_scaled_by_one_factor_between_ramp_and_limit() -> None:
    lm = model()
    budget = SpanBudget(lm, 0.5, alone)
    assert lm.spans() == [pytest.approx([27.5] * 4)] * 2  # half of 64, without the ramp and half a token for rounding
    first = budget.parts[0]
    assert isinstance(first, AdaptiveSpan)
    with torch.no_grad():
        first.ratio.copy_(torch.tensor([0.0, 0.1, 0.2, 1.0]))
    budget.after_step(None)
    windows = [z + 4 for layer in lm.spans() for z in layer if z is not None]
    assert sum(min(w, 64) for w in windows) == pytest.approx(8 * 31.5, rel=1e-4)
    assert windows[2] / windows[1] == pytest.approx((12.8 + 4) / (6.4 + 4), rel=1e-4)
    assert windows[1] / windows[0] == pytest.approx((6.4 + 4) / 4, rel=1e-4) and windows[3] >= 64


def test_price_is_what_a_token_is_worth_on_average() -> None:
    budget = SpanBudget(model(), 0.5, alone)
    for _ in range(60):
        budget.after_step(torch.tensor([-3.0, -1.0] * 4))
    assert budget.price.weight == pytest.approx(2.0, rel=1e-4)
    assert all(part.penalty_weight == pytest.approx(2.0 * 4, rel=1e-4) for part in budget.parts)
    other = SpanBudget(model(), 0.5, alone)
    other.load(budget.state())
    assert [part.penalty_weight for part in other.parts] == [part.penalty_weight for part in budget.parts]


def test_no_budget_leaves_the_penalty() -> None:
    assert make_budget(model(budget=0), alone) is None


@pytest.mark.parametrize(
    ("lm", "sentence"),
    [
        (lambda: model(budget=0.05), r"is 0.05, 3.2 of 64 tokens a head, but the ramps of the spans take 4.0; expected "
         "0.0625 or more, or a shorter model.attention.ramp"),
        (lambda: model("3 window(16) + 1 adaptive_span", 0.2), "take 1.0, and heads without a learned span 12.0 more; "
         "expected 0.2032 or more"),
        (lambda: model("2 window(16) + 2 adaptive_span", 0.9), "the longest spans take 32.0, and heads without a "
         "learned span 8.0 more; expected 0.625 or less, or longer spans"),
        (lambda: model("window(16)"), "is 0.5, and no head learns a span; expected adaptive_span or dynamic_span "
         "in model.attention.kind, or budget 0"),
        (lambda: model("span_linear"), "is 0.5, and SpanLinear costs more than its span; expected spans of kind"),
        (lambda: model("compressive(learned=true)"), "is 0.5, and Compressive costs more than its span"),
    ],
)  # fmt: skip
def test_budgets_that_cannot_be_met_are_refused(lm: Any, sentence: str) -> None:
    made = lm()
    with pytest.raises(ValueError, match=f"model.attention.budget .*{sentence}"):
        make_budget(made, alone)


@pytest.mark.parametrize("budget", [-0.1, 1.5, math.nan])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(ValueError, match=r"model\.attention\.budget is .*; expected a share of full attention's cost"):
        AttentionConfig(budget=budget)


def test_it_needs_a_language_model_and_a_price_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.kind is 'encoder'; expected 'lm', whose cost grows with max_span"):
        train(tiny(tmp_path, {"model.kind": "encoder", "model.attention.budget": 0.5}))
    with pytest.raises(ValueError, match=r"train.flop_price is 1 and model.attention.budget 0.5, which finds a price"):
        train(tiny(tmp_path, {"train.flop_price": 1.0, "model.attention.budget": 0.5, "out": str(tmp_path / "b")}))


def test_a_run_gets_a_budget_when_it_is_resumed(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.steps": 6}))
    train(tiny(tmp_path, {"resume": True, "model.attention.budget": 0.6}))
    rows = {row.step: row for row in read_run(tmp_path / "run").steps}
    assert math.isnan(rows[6].attention_share) and rows[12].attention_share == pytest.approx(0.6, rel=0.05)
