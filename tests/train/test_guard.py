"""Steps that would do harm: which are refused, that a run leaves them out, and that it ends when they are too many."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from spanformer.core.events import StopEvent
from spanformer.report.events import read_run
from spanformer.train import loop as running
from spanformer.train import objective
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.guard import SETTLED, Guard, TooManySkips
from spanformer.train.run import train
from support.tiny_runs import tiny


def settled(spike: float = 3.0, max_skips: int = 2) -> Guard:
    guard = Guard(spike, max_skips)
    for _ in range(SETTLED):
        assert guard.refuses(2.0, 1.0) is None
    return guard


def test_nonfinite_loss_or_gradient_is_refused() -> None:
    guard = Guard(0.0, 5)
    assert guard.refuses(math.nan, 1.0) == "the loss is nan"
    assert guard.refuses(math.inf, 1.0) == "the loss is inf"
    assert guard.refuses(1.0, math.nan) == "the gradient's norm is nan"
    assert guard.refuses(1.0, math.inf) == "the gradient's norm is inf"
    assert guard.refuses(1e9, 1e9) is None  # spikes are taken at 0


def test_spike_is_refused_when_losses_have_settled() -> None:
    guard = settled()
    assert guard.refuses(5.9, 1.0) is None
    said = guard.refuses(7.0, 1.0)
    assert said is not None and said.startswith("the loss is 7.000, 3.") and said.endswith(" times its recent average")
    assert guard.refuses(2.0, 1.0) is None
    early = Guard(3.0, 5)
    assert all(early.refuses(2.0, 1.0) is None for _ in range(SETTLED - 1)) and early.refuses(7.0, 1.0) is None


def test_average_does_not_depend_on_its_beginning() -> None:
    """It is a mean with weights, whatever the number of steps: a constant loss is its own average."""
    guard = settled()
    assert guard.average / (1 - 0.98**guard.steps) == pytest.approx(2.0, rel=1e-12)


def test_refused_losses_do_not_move_the_average() -> None:
    guard = settled()
    before = guard.average
    guard.refuses(100.0, 1.0)
    guard.refuses(math.nan, 1.0)
    assert guard.average == before


def test_too_many_skips_raise() -> None:
    guard = Guard(3.0, 2)
    guard.count("the loss is nan")
    with pytest.raises(TooManySkips, match=r"^2 steps were skipped, the last because the loss is inf; lower optim.lr"):
        guard.count("the loss is inf")


def test_guard_state_round_trip() -> None:
    guard, other = settled(), Guard(3.0, 2)
    guard.count("the loss is nan")
    other.load(guard.state())
    assert other.state() == guard.state() and other.refuses(7.0, 1.0) == guard.refuses(7.0, 1.0)


def spoil(monkeypatch: pytest.MonkeyPatch, losses: dict[int, float]) -> None:
    """The loss of these steps (the first is 1) is another, and its gradients as spoilt as it is."""
    real, step = running.backward, iter(range(1, 1_000_000))

    def backward(engine, model, *arguments, **options):
        found, state = real(engine, model, *arguments, **options)
        factor = losses.get(next(step))
        if factor is None:
            return found, state
        for parameter in model.parameters():
            parameter.grad *= factor
        return found._replace(loss=found.loss * factor), state

    monkeypatch.setattr(running, "backward", backward)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_run_skips_and_counts_bad_steps(tmp_path: Path, monkeypatch, bad: float) -> None:
    spoil(monkeypatch, {4: bad, 5: bad, 10: bad})
    result = train(tiny(tmp_path))
    run = read_run(tmp_path / "run")
    assert result.steps == 12 and result.bits is not None and math.isfinite(result.bits)
    assert [(row.step, row.reason) for row in run.skips] == [(n, f"the loss is {bad}") for n in (4, 5, 10)]
    by_step = {row.step: row for row in run.steps}
    assert math.isnan(by_step[4].loss) and by_step[4].memory == [] and math.isfinite(by_step[6].loss)
    assert (by_step[3].spans == by_step[4].spans).all() and (by_step[5].spans != by_step[6].spans).any()
    path = Checkpoints(tmp_path / "run" / "checkpoints").newest(lambda text: None)
    assert path is not None
    meta, parts = Checkpoints(path.parent).load(path)
    assert meta["guard"]["skips"] == 3
    assert all(torch.isfinite(t).all() for part in parts.values() for t in part.values())


def test_run_with_only_bad_steps_ends(tmp_path: Path, monkeypatch) -> None:
    spoil(monkeypatch, dict.fromkeys(range(5, 100), math.nan))
    seen: list[Any] = []
    good = tmp_path / "run" / "checkpoints" / "step-00000006"
    with pytest.raises(
        ValueError, match=r"^stopped at step 8: 4 steps were skipped, .*; the last good checkpoint is"
    ) as end:
        train(tiny(tmp_path, {"train.max_skips": 4}), watch=seen.append)
    assert str(end.value).endswith(f"; the last good checkpoint is {good}")
    assert isinstance(seen[-1], StopEvent) and seen[-1].reason.startswith("4 steps were skipped")
    assert Checkpoints(good.parent).newest(lambda text: None) == good


def test_run_that_is_bad_from_the_first_step(tmp_path: Path, monkeypatch) -> None:
    spoil(monkeypatch, dict.fromkeys(range(1, 100), math.nan))
    with pytest.raises(ValueError, match=r"^stopped at step 2: 2 steps .*; there is no checkpoint yet$"):
        train(tiny(tmp_path, {"train.max_skips": 2}))


def test_run_skips_spikes(tmp_path: Path, monkeypatch) -> None:
    spoil(monkeypatch, {SETTLED + 4: 50.0})
    changes = {"train.steps": SETTLED + 6, "train.eval_every": 0, "train.save_every": 0}
    train(tiny(tmp_path, changes))
    (skip,) = read_run(tmp_path / "run").skips
    assert skip.step == SETTLED + 4 and skip.reason.endswith(" times its recent average")


def test_validation_loss_that_is_not_finite_can_be_saved(tmp_path: Path, monkeypatch) -> None:
    real = objective.evaluate

    def evaluate(*arguments, **options):
        return real(*arguments, **options)._replace(nats=math.nan)

    monkeypatch.setattr(objective, "evaluate", evaluate)
    result = train(tiny(tmp_path, {"train.patience": 3, "train.steps": 100}))
    assert result.bits is None and result.reason == "3 evaluations brought no improvement"
    assert result.steps == 6  # the evaluation before the first step is one of them
