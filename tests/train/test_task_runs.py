"""A language model trained on a task: what counts, what is evaluated, resumed, evaluated otherwise and refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer import LM, load
from spanformer.attention import LSH
from spanformer.cli.eval_tasks import set_rounds
from spanformer.cli.main import main
from spanformer.data import parse_task, prepare, texts_of
from spanformer.data.tasks.copy import Copy
from spanformer.report.compare_table import side_by_side
from spanformer.report.events import read_run
from spanformer.report.spans_text import summary
from spanformer.train.distributed import World
from spanformer.train.evaluate import evaluate_task
from spanformer.train.loop import TrainingLoop
from spanformer.train.run import train, with_vocab
from spanformer.train.step import backward
from support.same_runs import assert_same_checkpoint, assert_same_events
from support.tiny_runs import tiny

SOURCE = "copy(symbols=3, distance=9)"
CHANGES = {"data.source": SOURCE, "train.steps": 4, "train.eval_every": 2, "train.save_every": 2}
LSH_CHANGES = CHANGES | {"model.attention.kind": "lsh(4, 4, 2)", "model.position.kind": "none"}
ALONE = World(0, 1, torch.device("cpu"), "one")


def test_only_answers_count(tmp_path: Path) -> None:
    """The loss is the mean over answers; the gradient of the token before the first question's context is not asked."""
    config = tiny(tmp_path, CHANGES)
    data = prepare(config.data)
    run = TrainingLoop(with_vocab(config, data), data, ALONE, tmp_path / "run", None)
    batch = run.objective.draw()
    assert batch.reset and batch.tokens == 4 * 3 and batch.counted is not None
    model = run.model
    assert isinstance(model, LM)
    losses, _ = backward(model, model, ALONE, batch, None, grad_accum_steps=2, dtype="float32")
    nll = model(batch.arguments["x"], targets=batch.arguments["targets"]).nll
    assert nll is not None
    asked = [9, 10, 11]  # the places whose next token is an answer
    torch.testing.assert_close(losses.loss, nll[:, asked].mean())
    assert batch.counted.sum() == 12 and batch.counted[:, asked].all()


class Knows(LM):
    """Predicts what stands `distance` − 1 tokens back: the copy."""

    def forward(self, x: torch.Tensor, *rest, **named):
        found = super().forward(x, *rest, **named)
        copied = torch.nn.functional.one_hot(x.roll(8, 1), 256).float()
        return found._replace(logits=50 * copied)


def test_right_answers_are_counted(tmp_path: Path) -> None:
    task = Copy(distance=9, symbols=3)
    texts = task.draw(np.random.default_rng(0), 33)
    score = evaluate_task(Knows(tiny_model(tmp_path)), texts, task.counted, batch=8)
    assert score.exact == 1.0 and score.loss < 1e-6 and score.tokens == 99
    texts[:, 10] = (texts[:, 10] + 1) % 96  # one answer of three is another
    score = evaluate_task(Knows(tiny_model(tmp_path)), texts, task.counted, batch=8)
    assert score.exact == pytest.approx(2 / 3) and score.loss == pytest.approx(50 / 3, rel=1e-3)


def tiny_model(folder: Path):
    config = tiny(folder, CHANGES)
    return with_vocab(config, prepare(config.data)).model


def test_it_goes_on_exactly(tmp_path: Path) -> None:
    train(tiny(tmp_path, CHANGES | {"out": str(tmp_path / "straight")}))
    train(tiny(tmp_path, CHANGES | {"train.steps": 2}))
    finished = train(tiny(tmp_path, CHANGES | {"resume": True}))
    assert finished.steps == 4
    run, straight = read_run(tmp_path / "run"), read_run(tmp_path / "straight")
    assert_same_events(run, straight)
    assert [row.exact for row in run.evals] == [row.exact for row in straight.evals]
    header, (row, _) = side_by_side([run, straight], ["run", "straight"])
    assert header[1] == "bits per answer byte" and "Answers right: " in summary(run) and run.start.objective == "task"
    assert row[header.index("exactly right")] == f"{run.evals[-1].exact:.1%}"
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight")


def test_eval_says_how_many_answers_are_right(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tiny(tmp_path, LSH_CHANGES))
    run, task = str(tmp_path / "run"), parse_task(SOURCE)
    assert task is not None
    ids = prepare(tiny(tmp_path, LSH_CHANGES).data).splits["test"].ids
    for rounds in (0, 1, 5):
        lm = load(run)
        if rounds:
            set_rounds(lm, rounds)
            assert [mechanism.rotations.shape[1] for mechanism in lm.modules() if isinstance(mechanism, LSH)] == 2 * [
                rounds
            ]
        score = evaluate_task(lm, texts_of(task, ids, "test"), task.counted)
        capsys.readouterr()
        main(["eval", run, "--rounds", str(rounds)])
        found = re.match(
            r"test: (\d+\.\d\d) % of 3,000 answers right\n(\d+\.\d{4}) bits per answer", capsys.readouterr().out
        )
        assert found is not None and score.exact is not None
        assert float(found[1]) == pytest.approx(100 * score.exact, abs=0.01)
        assert float(found[2]) == pytest.approx(score.loss / math.log(2), abs=1e-4)
    main(["eval", run, "--data", "copy(symbols=3, distance=20)", "--limit", "240"])
    assert "of 30 answers right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.block": 12}, "train.block is 12; a text of the task copy has 13 tokens, so expected at least that"),
        ({"model.kind": "encoder"}, "data.source is the task copy, and model.kind is 'encoder'; expected 'lm'"),
        ({"data.tokens": "char"}, "tokens is 'char'; expected 'byte'"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tiny(tmp_path, CHANGES | changes))


def test_eval_refusals(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tiny(tmp_path, CHANGES | {"train.steps": 1}))
    run = str(tmp_path / "run")
    for options, message in (
        (
            ["--lanes", "2"],
            "the data is the task copy; --protocol and --lanes are for streams of text",
        ),
        (["--rounds", "8"], "rounds is 8, and the model has no attention of kind lsh; expected 0"),
        (["--rounds", "-1"], "rounds is -1; expected 0 or more"),
    ):
        with pytest.raises(SystemExit):
            main(["eval", run, *options])
        assert message in capsys.readouterr().err.replace("\n", " ")
