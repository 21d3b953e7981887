"""What spans say about the settings of a run: each sentence provoked by a made-up history, and said once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spanformer.core.events import NoteEvent
from spanformer.model.config import AttentionConfig, ModelConfig
from spanformer.train.config import RunConfig
from spanformer.train.diagnose import PATIENCE, Diagnosis
from spanformer.train.optim import OptimConfig
from support.tiny_runs import tiny

CONFIG = RunConfig(
    model=ModelConfig(attention=AttentionConfig(max_span=1000, ramp=32.0, penalty=2e-6)),
    optim=OptimConfig(lr=1e-3, span_lr=2e-2, warmup=50),
)
SETTLED = 50 + PATIENCE
STILL = (
    f"no span has moved by a token in {SETTLED} steps: raise optim.span_lr (now 0.02) or model.attention.ramp (now 32; "
    "only distances on the ramp give a span gradients), or lower model.attention.penalty (now 2e-06)"
)
LIMIT = (
    "2 of 8 heads have reached max_span, 1,000 tokens: raise model.attention.max_span if longer context helps, or "
    "model.attention.penalty (now 2e-06) if it costs too much"
)
COLLAPSE = (
    "every span has collapsed to less than a token (the longest was 80): lower model.attention.penalty (now 2e-06) or "
    "optim.span_lr (now 0.02)"
)


def test_unmoved_spans_are_reported() -> None:
    diagnosis = Diagnosis(CONFIG, [0.0] * 4)
    assert diagnosis.check(SETTLED - 1, [0.9, 0.0, 0.1, 0.0]) == []
    assert diagnosis.check(SETTLED, [0.9, 0.0, 0.1, 0.0]) == [STILL]
    assert diagnosis.check(SETTLED + 10, [0.9, 0.0, 0.1, 0.0]) == []
    assert Diagnosis(CONFIG, [0.0] * 4).check(SETTLED, [0.0, 0.0, 1.5, 0.0]) == []
    free = replace(CONFIG, model=ModelConfig(attention=AttentionConfig(max_span=1000, ramp=32.0, penalty=0.0)))
    (text,) = Diagnosis(free, [0.0]).check(SETTLED, [0.0])
    assert text == STILL.partition(", or lower")[0]  # there is no price to lower
    assert Diagnosis(CONFIG, [5.0] * 2).check(SETTLED, [5.0, 3.5]) == []  # backwards is a movement too


def test_learning_rate_named_is_the_one_in_use() -> None:
    config = replace(CONFIG, optim=replace(CONFIG.optim, span_lr=0.0))
    (said,) = Diagnosis(config, [0.0]).check(SETTLED, [0.0])
    assert "raise optim.span_lr (now 0.001)" in said


def test_spans_at_their_limit() -> None:
    diagnosis = Diagnosis(CONFIG, [0.0] * 8)
    assert diagnosis.check(SETTLED, [990.0, *[10.0] * 7]) == []
    assert diagnosis.check(SETTLED - 1, [990.0, 1000.0, *[10.0] * 6]) == []
    assert diagnosis.check(SETTLED, [990.0, 1000.0, *[10.0] * 6]) == [LIMIT]
    assert diagnosis.check(SETTLED + 10, [1000.0] * 8) == []
    started_there = replace(CONFIG.model.attention, init=1.0)
    config = replace(CONFIG, model=replace(CONFIG.model, attention=started_there))
    assert Diagnosis(config, [1000.0] * 4).check(SETTLED, [1000.0, 1000.0, 1000.0, 500.0]) == []


def test_spans_that_collapsed() -> None:
    diagnosis = Diagnosis(CONFIG, [0.0] * 2)
    assert diagnosis.check(10, [80.0, 3.0]) == []
    assert diagnosis.check(20, [1.1, 0.0]) == []
    assert diagnosis.check(30, [0.9, 0.0]) == [COLLAPSE]
    assert diagnosis.check(40, [0.0, 0.0]) == []
    never_long = Diagnosis(CONFIG, [0.0] * 2)
    assert never_long.check(10, [60.0, 3.0]) + never_long.check(30, [0.5, 0.0]) == []
    assert Diagnosis(CONFIG, [80.0, 0.0]).check(10, [0.0, 0.0]) == [COLLAPSE]  # where they started counts


def test_dynamic_spans_are_compared_with_the_first_that_were_seen() -> None:
    diagnosis = Diagnosis(CONFIG, [])
    assert diagnosis.check(10, [30.0, 30.0]) == [] and diagnosis.check(SETTLED, [30.2, 29.9]) == [STILL]
    assert Diagnosis(CONFIG, []).check(SETTLED, []) == []


def test_a_budget_has_no_penalty_to_change() -> None:
    config = replace(CONFIG, model=ModelConfig(attention=AttentionConfig(max_span=1000, ramp=32.0, budget=0.2)))
    (still,) = Diagnosis(config, [168.0] * 2).check(SETTLED, [168.0] * 2, 0.2)
    assert still == STILL.partition(", or lower")[0]
    (limit,) = Diagnosis(config, [168.0] * 4).check(SETTLED, [1000.0, 0.0, 0.0, 0.0], 0.2)
    assert limit.endswith("raise model.attention.max_span if longer context helps")
    assert Diagnosis(config, [168.0] * 2).check(SETTLED, [0.2, 0.0], 0.2) == []


def test_a_missed_budget_is_reported() -> None:
    config = replace(CONFIG, model=ModelConfig(attention=AttentionConfig(max_span=1000, ramp=32.0, budget=0.2)))
    assert Diagnosis(config, [168.0]).check(SETTLED, [200.0], 0.2099) == []
    assert Diagnosis(config, [168.0]).check(SETTLED - 1, [200.0], 0.232) == []
    assert Diagnosis(config, [168.0]).check(SETTLED, [200.0], 0.232) == [
        "attention computes 0.232 of full attention's distances, and model.attention.budget is 0.2: dynamic spans "
        "follow it on average only; lower optim.span_lr (now 0.02)"
    ]


def test_advice_is_not_repeated_after_resuming() -> None:
    diagnosis = Diagnosis(CONFIG, [0.0] * 2)
    diagnosis.check(10, [80.0, 3.0])
    assert diagnosis.check(20, [0.0, 0.0]) == [COLLAPSE]
    resumed = Diagnosis(CONFIG, [0.0] * 2)
    resumed.load(diagnosis.state())
    assert resumed.check(30, [0.0, 0.0]) == [] and resumed.longest_ever == 80.0


def test_run_logs_advice_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanformer.report.events import read_run
    from spanformer.train import diagnose
    from spanformer.train.run import train

    monkeypatch.setattr(diagnose, "PATIENCE", 4)
    still = {"optim.span_lr": 1e-9, "model.attention.penalty": 0.0}
    seen: list[Any] = []
    train(tiny(tmp_path, still | {"train.steps": 9}), watch=seen.append)
    train(tiny(tmp_path, still | {"resume": True}), watch=seen.append)
    (note,) = [event for event in seen if isinstance(event, NoteEvent)]
    assert note.step == 7 and note.text.startswith("no span has moved by a token in 7 steps: raise optim.span_lr")
    assert [row.text for row in read_run(tmp_path / "run").notes] == [note.text]
