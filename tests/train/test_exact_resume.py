"""A run that was killed, ended by a signal or out of room goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from spanformer.core.events import NoteEvent
from spanformer.data import Batch, Lanes
from spanformer.report.events import read_run
from spanformer.train.run import Result, train
from support.killing import start
from support.same_runs import assert_same_checkpoint, assert_same_events, final
from support.tiny_runs import options, tiny

PAPER = {
    "model.paper_compat": True, "model.order": "post", "model.norm": "layer", "model.position.kind": "table",
    "model.feedforward.kind": "relu", "model.attention.dropout": 0.2, "model.feedforward.dropout": 0.1,
    "model.embedding.dropout": 0.1, "optim.kind": "adagrad", "optim.lr": 0.07, "optim.clip": 0.03,
    "train.grad_accum_steps": 2,
}  # fmt: skip
MODERN = {
    "model.heads": 4, "model.kv_heads": 2, "model.attention.tied": True, "optim.schedule": "cosine",
    "optim.span_lr": 0.05, "train.log_every": 4, "train.eval_every": 2, "train.save_every": 5, "train.threads": 2,
}  # fmt: skip


def rows(out: Path) -> int:
    try:
        return (out / "events.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def run_through(arguments: list[str], screen: Path, **how: int) -> int | None:
    process = start(arguments, screen, **how)
    process.join(60)
    return process.exitcode


def begun(process, out: Path, more: int) -> bool:
    """Wait until the run has written this many rows more, or has ended."""
    enough, deadline = rows(out) + more, time.monotonic() + 60
    while process.is_alive() and rows(out) < enough and time.monotonic() < deadline:
        time.sleep(0.001)
    return process.is_alive()


@pytest.mark.parametrize("changes", [PAPER, MODERN], ids=["paper", "modern"])
@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, changes: dict) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    screen = tmp_path / "screen"
    train(tiny(tmp_path, changes | {"out": str(straight)}))
    arguments = ["train", *options(tmp_path, changes | {"out": str(killed)}), "--resume"]
    draw, kills = random.Random(7), 0
    while kills < 4:
        process = start(arguments, screen)
        if begun(process, killed, draw.randint(2, 7)):
            time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.join()
        if process.exitcode == 0:
            break
        kills += 1
    train(tiny(tmp_path, changes | {"out": str(killed), "resume": True}))
    run = read_run(killed)
    assert kills and run.resumes
    assert_same_events(run, read_run(straight))
    assert_same_checkpoint(killed, straight)


@pytest.mark.slow
def test_killed_inside_saving(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    screen = tmp_path / "screen"
    train(tiny(tmp_path, {"out": str(straight)}))
    arguments = ["train", *options(tmp_path, {"out": str(killed)}), "--resume"]
    for moment in (8, 4, 6, 3, 1):  # the second checkpoint's second file; then ever earlier in the next one's saving
        assert run_through(arguments, screen, die_in_saving=moment) == -signal.SIGKILL, screen.read_text()
    train(tiny(tmp_path, {"out": str(killed), "resume": True}))
    assert_same_events(read_run(killed), read_run(straight))
    assert_same_checkpoint(killed, straight)
    assert {path.name for path in (killed / "checkpoints").iterdir()} >= {"step-00000009", "step-00000012"}
    assert not [path for path in (killed / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_saves_and_exits(tmp_path: Path, number: int, code: int) -> None:
    out, screen = tmp_path / "run", tmp_path / "screen"
    process = start(["train", *options(tmp_path, {"train.steps": 100_000, "train.save_every": 0})], screen)
    assert begun(process, out, 4)
    assert process.pid
    os.kill(process.pid, number)
    process.join(60)
    said = screen.read_text()
    assert process.exitcode == code and "Traceback" not in said
    assert f"stopped by {signal.Signals(number).name} at step " in said and "--resume" in said
    step = final(out)[0]["step"]
    assert step >= 1 and read_run(out).checkpoints[-1].step == step


INTERRUPTED = {
    "windows of several steps": {"train.log_every": 5, "train.eval_every": 4},
    "an evaluation is due": {"train.eval_every": 7, "train.save_every": 7},
    "dynamic spans": {"model.attention.kind": "dynamic_span"},
    "hybrid layers": {"model.attention.stack": ["window(8)", "1 full + 1 adaptive_span"]},
    "a budget": {"model.attention.budget": 0.4, "optim.span_lr": 0.05},
    "a budget of dynamic spans": {"model.attention.kind": "dynamic_span", "model.attention.budget": 0.4},
    "experts": {"model.feedforward.experts": 3, "model.feedforward.dropout": 0.1},
    "persistent": {"model.persistent": 5, "model.feedforward.kind": "none", "model.attention.dropout": 0.1},
    "adaptive embedding": {"data.tokens": "word", "model.embedding.cutoffs": [10, 30], "model.embedding.tied": True},
    "bfloat16": {"train.dtype": "bfloat16", "train.grad_accum_steps": 2},
    "sgd": {"optim.kind": "sgd"},
    "muon": {"optim.kind": "muon"},
    "recomputed activations": {"train.checkpointing": True, "model.attention.dropout": 0.2},
    "reversible": {
        "model.stack": "reversible",
        "model.attention.dropout": 0.2,
        "model.feedforward.dropout": 0.1,
        "model.feedforward.chunk": 50,
        "model.embedding.loss_chunk": 70,
        "train.grad_accum_steps": 2,
    },
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_interrupted_and_continued(tmp_path: Path, name: str) -> None:
    changes = INTERRUPTED[name]
    train(tiny(tmp_path, changes | {"out": str(tmp_path / "straight")}))
    stopped = stop_at(7, tmp_path, changes)
    assert (stopped.reason, stopped.signal, stopped.steps) == ("SIGTERM", signal.SIGTERM, 7)
    finished = train(tiny(tmp_path, changes | {"resume": True}))
    assert (finished.reason, finished.signal, finished.steps) == ("all steps done", 0, 12)
    assert_same_events(read_run(tmp_path / "run"), read_run(tmp_path / "straight"))
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight")


def stop_at(step: int, folder: Path, changes: dict) -> Result:
    """A run that gets a signal in the middle of this step."""
    real = Lanes.__next__

    def counted(lanes: Lanes) -> Batch:
        batch = real(lanes)
        if lanes.position == step * lanes.block:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "__next__", counted)
        return train(tiny(folder, changes))


def test_finished_run_can_continue(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"out": str(tmp_path / "straight"), "train.save_every": 6, "train.keep": 5}))
    train(tiny(tmp_path, {"train.steps": 6}))
    before = (tmp_path / "run" / "checkpoints" / "step-00000006" / "meta.json").stat().st_mtime_ns
    again = train(tiny(tmp_path, {"train.steps": 6, "resume": True}))
    assert (again.reason, again.steps) == ("all steps done", 6)
    assert (tmp_path / "run" / "checkpoints" / "step-00000006" / "meta.json").stat().st_mtime_ns == before
    train(tiny(tmp_path, {"resume": True}))
    assert_same_events(read_run(tmp_path / "run"), read_run(tmp_path / "straight"))
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight")


def test_another_learning_rate_after_resuming(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.steps": 6}))
    train(tiny(tmp_path, {"resume": True, "optim.lr": 0.001, "optim.span_lr": 0.5}))
    rates = {row.step: row.lr for row in read_run(tmp_path / "run").steps}
    assert rates[6] == 0.01 and rates[7] == 0.001


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no meta"])
def test_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path: Path, damage: str) -> None:
    train(tiny(tmp_path, {"out": str(tmp_path / "straight")}))
    train(tiny(tmp_path, {"train.steps": 9}))
    newest = tmp_path / "run" / "checkpoints" / "step-00000009"
    model = newest / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 4
    if damage == "no meta":
        (newest / "meta.json").unlink()
    else:
        model.write_bytes(content if damage == "flipped" else content[:-100])
    seen: list[Any] = []
    train(tiny(tmp_path, {"resume": True}), watch=seen.append)
    (note,) = [event.text for event in seen if isinstance(event, NoteEvent)]
    assert note.startswith(f"{newest} is not complete: ")
    assert [row.step for row in read_run(tmp_path / "run").resumes] == [6]
    straight, run = read_run(tmp_path / "straight"), read_run(tmp_path / "run")
    assert [row.loss for row in straight.steps] == [row.loss for row in run.steps]
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight")


def test_run_without_complete_checkpoint_does_not_restart(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.keep": 1}))
    (only,) = (tmp_path / "run" / "checkpoints").iterdir()
    (only / "optimizer.safetensors").unlink()
    before = (tmp_path / "run" / "events.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"^no checkpoint is complete: .*optimizer.safetensors is missing; ch"):
        train(tiny(tmp_path, {"resume": True}))
    assert (tmp_path / "run" / "events.jsonl").read_bytes() == before and only.exists()


def test_killed_before_the_first_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    old = json.dumps({"event": "start", "format": 1}) + '\n{"event": "st'
    (out / "events.jsonl").write_text(old)
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events.out.tfevents.1").write_text("x")
    seen: list[Any] = []
    result = train(tiny(tmp_path, {"resume": True}), watch=seen.append)
    assert result.steps == 12 and read_run(out).steps[0].step == 1
    assert (out / "before-1" / "events.jsonl").read_text() == old
    assert (out / "before-1" / "tensorboard" / "events.out.tfevents.1").exists()
    assert [event.text for event in seen if isinstance(event, NoteEvent)] == [
        f"no checkpoint to resume from: the run starts again; files of the earlier attempt are in {out / 'before-1'}"
    ]


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    result = train(tiny(tmp_path, {"resume": True}))
    run = read_run(tmp_path / "run")
    assert result.steps == 12 and not run.resumes and not run.notes


def test_full_disk(tmp_path: Path) -> None:
    straight, out, screen = tmp_path / "straight", tmp_path / "run", tmp_path / "screen"
    train(tiny(tmp_path, {"out": str(straight)}))
    arguments = ["train", *options(tmp_path)]
    train(tiny(tmp_path, {"train.steps": 3}))
    saved = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    largest = max(len(content) for content in saved.values())
    code = run_through([*arguments, "--resume"], screen, most_bytes=largest - 1)
    said = screen.read_text()
    assert code == 2 and "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if line.startswith("spanformer: ")]
    path = out / "checkpoints" / "step-00000006"
    assert sentence == (
        f"spanformer: {path} could not be saved (File too large); earlier files are unchanged, so make room or "
        "choose another folder"
    )
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == saved
    screen.write_text("")
    few = (out / "events.jsonl").stat().st_size + 100  # now the events are what finds no room
    assert run_through([*arguments, "--resume"], screen, most_bytes=few) == 2
    assert "events.jsonl cannot be written (File too large); make room and resume the run" in screen.read_text()
    train(tiny(tmp_path, {"resume": True}))
    assert_same_events(read_run(out), read_run(straight))
    assert_same_checkpoint(out, straight)
