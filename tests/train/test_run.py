"""What a run can do, each thing by training with it: precisions, compiled parts, pieces of a batch, ways to end, kinds
of tokens and of models, TensorBoard."""

from __future__ import annotations

import math
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spanformer.core.events import EvalEvent, Event, StartEvent, StepEvent
from spanformer.core.fields import build
from spanformer.data import prepare
from spanformer.model.config import ModelConfig
from spanformer.model.lm import LM
from spanformer.report.events import Run, read_run
from spanformer.train import loop as running
from spanformer.train import objective
from spanformer.train import progress as progressing
from spanformer.train.checkpoint import Checkpoints
from spanformer.train.config import RunConfig, TrainConfig
from spanformer.train.optim import OptimConfig
from spanformer.train.progress import Progress, schedule_factor
from spanformer.train.run import Result, train
from support.tiny_runs import tiny, write_text

SHORT = {"train.eval_every": 0, "train.save_every": 0}


def run(folder: Path, changes: dict[str, Any], name: str = "run") -> Run:
    train(tiny(folder, changes | {"out": str(folder / name)}))
    return read_run(folder / name)


def losses(found: Run) -> list[float]:
    return [row.loss for row in found.steps]


def assert_it_learns(found: Run) -> None:
    assert np.isfinite(losses(found)).all() and found.steps[-1].loss < found.steps[0].loss - 0.5
    assert found.evals[-1].bits < found.evals[0].bits - 0.5
    first, last = found.steps[0].spans, found.steps[-1].spans
    learned = np.isfinite(last)
    assert (first[learned] != last[learned]).all()


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped, tied spans": {"model.heads": 4, "model.kv_heads": 2, "model.attention.tied": True},
    "paper": {
        "model.paper_compat": True, "model.order": "post", "model.norm": "layer", "model.position.kind": "table",
        "model.feedforward.kind": "relu", "optim.kind": "adagrad", "optim.lr": 0.07, "optim.clip": 0.03,
    },
    "hybrid layers": {"model.attention.stack": ["window(8)", "adaptive_span"]},
    "hybrid heads": {"model.attention.stack": ["1 window(8) + 1 adaptive_span", "1 full + 1 dynamic_span"]},
    "dynamic spans": {"model.attention.kind": "dynamic_span"},
    "experts": {"model.feedforward.experts": 3},
    "persistent": {"model.persistent": 6, "model.feedforward.kind": "none"},
    "adaptive embedding": {"data.tokens": "word", "model.embedding.cutoffs": [10, 30], "model.embedding.tied": True},
    "full": {"model.attention.kind": "full"},
    "alibi": {"model.position.kind": "alibi"},
    "sgd": {"optim.kind": "sgd", "optim.lr": 0.3},
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_learns(tmp_path: Path, name: str) -> None:
    assert_it_learns(run(tmp_path, {"train.steps": 30, "train.log_every": 1} | KINDS[name] | SHORT))


def test_bfloat16(tmp_path: Path) -> None:
    half = run(tmp_path, {"train.steps": 30, "train.dtype": "bfloat16", "train.grad_accum_steps": 2} | SHORT, "half")
    whole = run(tmp_path, {"train.steps": 30} | SHORT, "whole")
    assert_it_learns(half)
    assert losses(half) != losses(whole)
    assert np.allclose(losses(half), losses(whole), rtol=0.05)  # bfloat16 has 8 bits: 0.4 % a product


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    """Grouped keys, and memory lengths that change as the text goes on: nothing is compiled again for that."""
    changes = KINDS["grouped, tied spans"] | SHORT | {"train.steps": 8}
    eager = run(tmp_path, changes, "eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run(tmp_path, changes | {"train.compile": True}, "compiled")
    assert len({tuple(row.memory) for row in compiled.steps}) > 1
    assert np.allclose(losses(compiled), losses(eager), rtol=1e-4)
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # with and without gradients, other batches
    assert not torch._dynamo.utils.counters["graph_break"]


def test_recomputed_activations(tmp_path: Path) -> None:
    changes = SHORT | {"model.attention.dropout": 0.2, "model.feedforward.dropout": 0.2}
    kept = run(tmp_path, changes, "sink_tokens")
    assert losses(run(tmp_path, changes | {"train.checkpointing": True}, "recomputed")) == losses(kept)


def test_pieces_of_a_batch(tmp_path: Path) -> None:
    """The same up to rounding: a difference of one part in 10⁷ that 12 steps of training let grow."""
    whole = losses(run(tmp_path, SHORT, "whole"))
    for pieces in (2, 4):
        assert np.allclose(
            losses(run(tmp_path, SHORT | {"train.grad_accum_steps": pieces}, f"in {pieces}")), whole, rtol=1e-4
        )


def test_more_than_one_epoch(tmp_path: Path) -> None:
    """Lanes of 1,340 bytes begin again after 83 blocks; the memory then does too."""
    found = run(tmp_path, SHORT | {"train.steps": 90, "train.spike": 0.0})
    assert [row.memory[0] for row in found.steps][81:85] == [128, 128, 16, 32]


def test_spans_have_a_learning_rate_of_their_own(tmp_path: Path) -> None:
    moved = []
    for rate in (1e-3, 1e-1):
        found = run(tmp_path, SHORT | {"optim.span_lr": rate}, f"at {rate}")
        moved.append(np.abs(found.steps[-1].spans - 8.0).mean())
    assert moved[1] > 20 * moved[0] > 0


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = iter([5.0, 4.0, 3.0, 3.5, 3.0, 2.0, 1.0])
    real = objective.evaluate

    def evaluate(*arguments: Any, **options: Any):
        found = real(*arguments, **options)
        return found._replace(nats=next(bits) * math.log(2) * found.units)

    monkeypatch.setattr(objective, "evaluate", evaluate)
    result = train(tiny(tmp_path, {"train.patience": 2, "train.steps": 100}))
    assert (result.reason, result.steps) == ("2 evaluations brought no improvement", 12)
    assert result.bits == pytest.approx(3.0)
    best = Checkpoints(tmp_path / "run" / "checkpoints").best()
    assert best is not None and best.name in ("step-00000006", "step-00000012")
    # continued, it is still at its end
    again = train(tiny(tmp_path, {"train.patience": 2, "train.steps": 100, "resume": True}))
    assert (again.reason, again.steps) == (result.reason, 12)


def test_only_an_evaluated_model_has_a_score(tmp_path: Path) -> None:
    """A checkpoint between two evaluations is not taken for as good as the model was before it."""
    train(tiny(tmp_path, {"train.eval_every": 4, "train.save_every": 3, "train.keep": 9, "train.steps": 10}))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    scores = {path.name: checkpoints.load(path)[0]["score"] for path in checkpoints._paths()}
    assert [name for name, score in scores.items() if score is None] == [
        "step-00000003",
        "step-00000006",
        "step-00000009",
    ]
    assert scores["step-00000010"] is not None


def clocked(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Every step takes this many seconds by the clock, which it reads three times."""
    reads = iter(range(1_000_000))
    monkeypatch.setattr(running.time, "perf_counter", lambda: next(reads) * seconds / 2)


def test_budget_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = SHORT | {"train.minutes": 0.5, "train.steps": 10_000, "optim.schedule": "cosine", "train.log_every": 7}
    with monkeypatch.context() as patch:
        clocked(patch, 1.0)
        result = train(tiny(tmp_path, changes))
    assert result.reason == "0.5 minutes have passed"
    found = read_run(tmp_path / "run")
    last = found.steps[-1]
    assert last.step == result.steps and 29 <= result.steps <= 31 and last.seconds >= 30
    again = train(tiny(tmp_path, changes | {"resume": True}))
    assert (again.reason, again.steps) == (result.reason, result.steps)  # there is no time left for another step
    rates = [row.lr for row in found.steps]
    assert last.lr == pytest.approx(0.001, rel=0.2), "the cosine ends with the budget, at a tenth"
    assert max(rates) > 0.005 and rates == sorted(rates, reverse=True)


def test_schedule_by_time_follows_the_pace() -> None:
    config = RunConfig(train=TrainConfig(minutes=10.0, steps=10_000), optim=OptimConfig(warmup=0, floor=0.1))
    by_steps = RunConfig(train=TrainConfig(steps=600), optim=config.optim)
    for step in (0, 1, 150, 300, 599):  # a second each
        assert schedule_factor(config, step, step + 1.0) == pytest.approx(
            schedule_factor(by_steps, step, 0.0), rel=1e-9
        )
    assert schedule_factor(config, 0, 1.0) == pytest.approx(1.0, abs=1e-4)
    assert schedule_factor(config, 599, 600.0) == pytest.approx(0.1)
    assert schedule_factor(config, 299, 600.0) == pytest.approx(0.1), "twice as slow: it is over as well"
    few = RunConfig(train=TrainConfig(minutes=10.0, steps=100), optim=config.optim)
    assert schedule_factor(few, 99, 10.0) == pytest.approx(0.1), "the steps may end before the time does"


def test_progress_averages_since_the_last_row() -> None:
    p = Progress(step=4, seconds=2.0, tokens=400)
    p.add(1.0, 0.5)
    p.add(3.0, 1.5)
    assert (p.mean_loss, p.mean_penalty, p.tokens_per_second) == (2.0, 1.0, 200.0)
    p.clear()
    assert math.isnan(p.mean_loss) and math.isnan(p.mean_penalty) and math.isnan(p.tokens_per_second)
    other = progressing.Progress()
    other.load(p.state())
    assert other == p


TOKENS = {"byte": "byte", "char": "char", "word": "word", "bpe": "byte"}


@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_are_counted_per_unit(tmp_path: Path, tokens: str) -> None:
    """By hand, from the text itself: nats per token, tokens per unit."""
    changes = {"data.tokens": tokens, "train.steps": 2, "train.eval_tokens": 0, "train.log_every": 1}
    if tokens == "bpe":
        changes["data.vocab"] = 300
    seen: list[Any] = []
    train(tiny(tmp_path, changes), watch=seen.append)
    raw = (tmp_path / "text.txt").read_bytes()
    size = len(raw)
    valid = raw[size - round(size * 0.05) - round(size * 0.1) : size - round(size * 0.05)]
    count = {
        "byte": len(valid),
        "char": len(valid.decode(errors="ignore")),
        "word": len(valid.decode(errors="ignore").replace("\n", " <eos> ").split()) + (not valid.endswith(b"\n")),
        "bpe": len(valid.decode(errors="ignore").encode()),
    }[tokens]
    (start,) = [event for event in seen if isinstance(event, StartEvent)]
    assert start.unit == TOKENS[tokens] and start.units["valid"] == count
    last = [event for event in seen if isinstance(event, EvalEvent)][-1]
    assert last.tokens == start.tokens["valid"]
    assert last.bits == pytest.approx(last.loss * last.tokens / count / math.log(2), rel=1e-12)
    step = [event for event in seen if isinstance(event, StepEvent)][-1]
    per_unit = start.tokens["train"] / start.units["train"]
    assert step.bits == pytest.approx(step.loss * per_unit / math.log(2), rel=1e-12)
    assert per_unit < 0.9 if tokens == "bpe" else per_unit == 1.0


def test_every_event_is_watched_and_written(tmp_path: Path) -> None:
    seen: list[Any] = []
    train(tiny(tmp_path, {"train.measure": True}), watch=seen.append)
    kinds = [event.kind for event in seen if isinstance(event, Event)]
    assert kinds[:2] == ["start", "eval"] and kinds[-4:] == ["eval", "checkpoint", "cost", "stop"]
    assert kinds.count("step") == 12 and kinds.count("eval") == 5 and kinds.count("checkpoint") == 4
    written = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len(written) == len(kinds)
    found = read_run(tmp_path / "run")
    assert found.start.shape.dim == 16 and found.start.tokens["train"] > 5000
    lm = trained(tmp_path / "run")
    assert found.steps[-1].reach.tolist() == lm.distances()
    assert (found.steps[-1].spans == np.array(lm.spans(), dtype=float)).all()
    z = found.steps[-1].spans
    assert (found.steps[-1].reach == np.ceil(z + 4.0)).all()  # the ramp: distances with a weight above 0


def trained(out: Path) -> LM:
    checkpoints = Checkpoints(out / "checkpoints")
    path = checkpoints.newest(lambda text: None)
    assert path is not None
    meta, parts = checkpoints.load(path)
    lm = LM(build(ModelConfig, meta["model"]))
    lm.load_state_dict(parts["model"])
    return lm


def test_data_is_read_in_order(tmp_path: Path) -> None:
    """Training one step on the first block of every lane, by hand."""
    config = tiny(tmp_path, SHORT | {"train.steps": 1})
    train(config)
    torch.manual_seed(config.train.seed)
    lm = LM(ModelConfig(**{**config.model.__dict__, "vocab": 256}))
    ids = prepare(config.data).splits["train"].ids
    length = len(ids) // 4
    rows = torch.stack([torch.from_numpy(ids[r * length : r * length + 17].astype(np.int64)) for r in range(4)])
    found = lm(rows[:, :-1], targets=rows[:, 1:])
    assert found.nll is not None
    (row,) = read_run(tmp_path / "run").steps
    assert row.loss == pytest.approx(float(found.nll.detach().mean()), rel=1e-6)
    assert row.penalty == pytest.approx(float(found.penalty.detach()), rel=1e-6)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(tmp_path, {"train.tensorboard": "auto", "train.steps": 6}))
    train(tiny(tmp_path, {"train.tensorboard": "on", "resume": True}))
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    shown = {event.step: event.value for event in board.Scalars("step/loss")}
    assert shown == pytest.approx({row.step: row.loss for row in read_run(tmp_path / "run").steps}, rel=1e-6)
    assert {"step/span_average", "step/lr", "eval/bits"} <= set(board.Tags()["scalars"])
    train(tiny(tmp_path, SHORT | {"out": str(tmp_path / "off"), "train.steps": 1}))
    assert not (tmp_path / "off" / "tensorboard").exists()


def test_training_in_a_thread_restores_signal_handlers(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    found: list[Result] = []
    thread = threading.Thread(target=lambda: found.append(train(tiny(tmp_path, SHORT | {"train.steps": 2}))))
    thread.start()
    thread.join()
    assert found[0].steps == 2
    train(tiny(tmp_path, SHORT | {"train.steps": 2, "out": str(tmp_path / "again")}))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_long_text_is_not_read_into_memory(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt", 20_000)
    assert isinstance(prepare(tiny(tmp_path).data).splits["train"].ids, np.memmap)
