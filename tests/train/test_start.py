"""A run may begin with the weights of another model (`train.start`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spanformer.model.load import load
from spanformer.report.events import read_run
from spanformer.train.run import train
from support.tiny_runs import tiny, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a finished run in `run`."""
    folder = tmp_path_factory.mktemp("start")
    train(tiny(folder))
    return folder


def started(folder: Path, name: str, changes: dict | None = None) -> Path:
    train(tiny(folder, {"out": str(folder / name), "train.start": str(folder / "run")} | (changes or {})))
    return folder / name


def test_run_begins_with_the_weights_and_spans_of_another(folder: Path) -> None:
    """A learning rate of 0 leaves them as they are."""
    still = {"optim.lr": 0.0, "optim.span_lr": 0.0, "optim.weight_decay": 0.0, "train.steps": 1}
    again, first = load(started(folder, "still", still)), load(folder / "run")
    assert all(torch.equal(t, first.state_dict()[name]) for name, t in again.state_dict().items())


def test_run_begins_where_the_other_ended_in_loss(folder: Path) -> None:
    other, run = read_run(folder / "run"), read_run(started(folder, "more"))
    assert run.evals[0].bits < other.evals[0].bits - 1 and run.evals[0].step == 0


def test_budget_is_kept_from_the_first_step_on(folder: Path) -> None:
    """The budget sets the windows of the other model's spans, not those of new ones."""
    run = read_run(started(folder, "budget", {"model.attention.budget": 0.4}))
    kept = [float((row.spans + 4.0).mean()) / 32 for row in run.steps]
    assert max(abs(share - 0.4) for share in kept) < 0.03


def test_model_of_other_sizes_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"run/checkpoints/step-\d+ does not fit this model: .*8"):
        started(folder, "wide", {"model.dim": 8})


def test_model_of_other_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.start is .*/run, whose vocabulary is not that of .*text\.txt"):
        started(folder, "letters", {"data.tokens": "char", "model.vocab": 256})


def test_missing_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="nowhere does not exist; expected the folder of a model"):
        started(folder, "missing", {"train.start": str(folder / "nowhere")})


def test_interrupted_run_resumes_without_the_other(folder: Path) -> None:
    """The weights at the start are in the checkpoint."""
    write_text(folder / "text.txt")
    train(tiny(folder, {"out": str(folder / "cut"), "train.start": str(folder / "run"), "train.steps": 6}))
    changes = {"out": str(folder / "cut"), "train.start": str(folder / "gone"), "resume": True}
    assert train(tiny(folder, changes)).steps == 12
