"""What a user can get wrong ends with one sentence, exit code 2, and nothing overwritten: by the real command line."""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spanformer.cli.main import main
from spanformer.model import folder
from spanformer.train.run import train
from support.refusals import refusal
from support.tiny_runs import options, tiny, write_text


def refused(folder: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture, *more: str) -> str:
    return refusal(["train", *options(folder, changes), *more], capsys)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TEXTS: dict[str, tuple[bytes, dict[str, Any], str]] = {
    "empty": (b"", {}, "source '{text}' is empty; expected some text"),
    "binary": (
        b"some text \x00 and more" * 50, {"data.tokens": "char"},
        "{text} is binary, with a NUL byte at offset 10; use byte tokens",
    ),
    "not UTF-8": (
        b"caf\xe9 " * 500, {"data.tokens": "word"},
        "{text} is not UTF-8: byte 0xe9 at offset 3; convert it, or use byte tokens",
    ),
    "shorter than a block": (
        b"a text" * 10, {},
        "51 tokens are too few for 4 lanes with blocks of 16, which need 68; use more text, fewer lanes or a shorter "
        "block",
    ),
    "no validation data": (
        b"text" * 100, {"data.valid": 1e-6},
        "source '{text}' leaves nothing for the split 'valid'; expected more text, a larger share, or three files or "
        "more",
    ),
    "one token to validate with": (
        b"text" * 100, {"data.valid": 0.0026},
        "the validation split has 1 token; expected 2 or more: use more text, a larger data.valid or a larger "
        "train.eval_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_bad_text_is_refused(tmp_path: Path, capsys, name: str) -> None:
    written, changes, expected = TEXTS[name]
    text = tmp_path / "text.txt"
    text.write_bytes(written)
    assert refused(tmp_path, changes, capsys) == expected.format(text=text)
    # and the folder is free for the next try
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    write_text(text)
    assert train(tiny(tmp_path, {"train.steps": 1})).steps == 1


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no GPU": ({"train.device": "cuda"}, "train.device is cuda, but PyTorch finds no GPU; expected cpu or auto"),
    "no such device": (
        {"train.device": "gpu"}, "train.device is 'gpu', which PyTorch cannot use here; expected cpu or auto",
    ),
    "vocabulary": ({"model.vocab": 20}, "model.vocab is 20; the data has 256 tokens, so expected at least that"),
    "micro-batches": (
        {"train.grad_accum_steps": 3}, "train.grad_accum_steps is 3; expected a divisor of train.batch, 4 (see ",
    ),
    "learning rate": ({"optim.lr": "nan"}, "lr is nan; expected a finite number, 0 or more (see "),
    "minutes": ({"train.minutes": "inf"}, "train.minutes is inf; expected a finite number, 0 or more (see "),
    "spike": ({"train.spike": "nan"}, "train.spike is nan; expected a finite number, 0 or more (see "),
    "seed": ({"train.seed": -1}, "train.seed is -1; expected 0 … 2147483647 (see "),
    "penalty": ({"model.attention.penalty": "nan"}, "model.attention.penalty is nan; expected 0 or more (see "),
    "kind beside a stack": (
        {"model.attention.kind": "full", "model.attention.stack": "window(8)"},
        "attention.kind is 'full', and attention.stack names the kind of each layer; empty the stack",
    ),
    "ramp": ({"model.attention.ramp": "nan"}, "model.attention.ramp is nan; expected a positive, finite number of tok"),
    "init": ({"model.attention.init": "nan"}, "model.attention.init is nan; expected a share of max_span, 0 … 1 (see "),
    "attention dropout": ({"model.attention.dropout": 1}, "model.attention.dropout is 1.0; expected a share, 0 … 1 wi"),
    "feed-forward dropout": ({"model.feedforward.dropout": "nan"}, "model.feedforward.dropout is nan; expected a shar"),
    "embedding dropout": ({"model.embedding.dropout": "nan"}, "model.embedding.dropout is nan; expected a share, 0 … "),
    "rotary base": ({"model.position.base": "nan"}, "model.position.base is nan; expected a positive, finite number"),
    "balance": ({"model.feedforward.balance": "nan"}, "model.feedforward.balance is nan; expected 0 or more (see "),
    "window": ({"model.attention.window": 0}, "model.attention.window is 0; expected at least 1 (see "),
    "max_span": ({"model.attention.max_span": 0}, "model.attention.max_span is 0; expected at least 1 (see "),
    "a budget below the ramp": (
        {"model.attention.budget": 0.1},
        "model.attention.budget is 0.1, 3.2 of 32 tokens a head, but the ramps of the spans take 4.0; expected 0.125 "
        "or more, or a shorter model.attention.ramp",
    ),
    "a limit shorter than a block": (
        {"model.attention.kind": "fixed(40, 2)"}, "size is 40 and max_span 32; expected a block within max_span",
    ),
    "backend": ({"model.attention.backend": "natve"}, "model.attention.backend is 'natve'; expected one of auto, nati"),
    "share": ({"data.valid": "nan"}, "valid is nan; expected a share of the text, between 0 and 1 (see "),
    "a wrong name": ({"optim.learning_rate": 1}, "there is no option --optim.learning-rate; did you mean --optim.lr? "),
    "a word for a number": ({"train.steps": "many"}, "--train.steps is 'many'; expected a whole number (see "),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_option_is_refused(tmp_path: Path, capsys, name: str) -> None:
    changes, expected = OPTIONS[name]
    said = refused(tmp_path, changes, capsys)
    assert said.startswith(expected)
    assert not (tmp_path / "run").exists() or not content(tmp_path / "run")


def test_negative_limit_of_an_evaluation(capsys) -> None:
    assert refusal(["eval", "somewhere", "--limit", "-5"], capsys).startswith("limit is -5; expected 0 or more (see ")


def test_folder_with_files_is_refused(tmp_path: Path, capsys) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    before = content(tmp_path / "run")
    assert refused(tmp_path, {}, capsys) == (
        f"{tmp_path / 'run'} exists already; continue the run in it with --resume, or choose another --out"
    )
    assert content(tmp_path / "run") == before


def test_impossible_folder_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    assert refused(tmp_path, {"out": str(tmp_path / "file")}, capsys) == (
        f"{tmp_path / 'file'} is a file; expected a folder for the run, choose another --out"
    )
    below = tmp_path / "file" / "run"
    assert refused(tmp_path, {"out": str(below)}, capsys) == (
        f"{below} cannot be made or read (Not a directory); choose another --out"
    )
    assert (tmp_path / "file").read_text() == "mine"


def as_anyone(arguments: list[str]) -> subprocess.CompletedProcess:
    """The command by a user for whom permissions hold, also where that is root: without the right to pass them by."""

    def give_up_rights() -> None:
        for right in (1, 2) if os.geteuid() == 0 else ():  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
            if ctypes.CDLL(None).prctl(24, right, 0, 0, 0):  # PR_CAPBSET_DROP
                os._exit(77)

    command = [sys.executable, "-m", "spanformer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=give_up_rights)
    if done.returncode == 77:
        pytest.skip("rights cannot be given up here")
    return done


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gives up rights as Linux has them")
@pytest.mark.slow
def test_folder_without_permission(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    before = content(tmp_path / "run")
    (tmp_path / "closed").mkdir(mode=0o500)
    out = tmp_path / "closed" / "run"
    done = as_anyone(["train", *options(tmp_path, {"out": str(out)})])
    assert done.returncode == 2
    assert done.stderr == f"spanformer: {out} cannot be made or read (Permission denied); choose another --out\n"
    assert not content(tmp_path / "closed")
    # a run that may be read only is not continued
    events = tmp_path / "run" / "events.jsonl"
    events.chmod(0o400)
    done = as_anyone(["train", *options(tmp_path), "--resume"])
    assert done.returncode == 2
    assert done.stderr == f"spanformer: {events} cannot be written (Permission denied); choose another folder\n"
    assert content(tmp_path / "run") == before


def test_no_room_for_the_first_checkpoint(tmp_path: Path, capsys, monkeypatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_fill", full)
    assert refused(tmp_path, {}, capsys) == (
        f"{tmp_path / 'run' / 'checkpoints' / 'step-00000003'} could not be saved (No space left on device); earlier "
        "files are unchanged, so make room or choose another folder"
    )
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


CHANGED = {
    "width": ({"model.dim": 32}, "model.dim = 16, but this run has 32"),
    "a deeper key": ({"model.attention.max_span": 64}, "model.attention.max_span = 32, but this run has 64"),
    "tokens": ({"data.tokens": "char"}, "model.vocab = 256, but this run has "),
    "lanes": ({"train.batch": 2}, "train.batch = 4, but this run has 2"),
    "block": ({"train.block": 8}, "train.block = 16, but this run has 8"),
    "seed": ({"train.seed": 2}, "train.seed = 1, but this run has 2"),
    "optimiser": ({"optim.kind": "sgd"}, "optim.kind = 'adamw', but this run has 'sgd'"),
}


def test_checkpoint_of_another_run(tmp_path: Path, capsys) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    before = content(tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    for changes, expected in CHANGED.values():
        said = refused(tmp_path, changes, capsys, "--resume")
        assert said.startswith(f"{path} was made with {expected}"), said
        assert said.endswith("; change it back, or start another run with another --out")
        assert content(tmp_path / "run") == before


def test_text_that_has_changed_since(tmp_path: Path, capsys) -> None:
    changes = {"train.steps": 3, "data.tokens": "char"}
    text = write_text(tmp_path / "text.txt")
    train(tiny(tmp_path, changes))
    said = text.read_text()
    text.write_text(said.replace("a", "A"))
    assert refused(tmp_path, changes, capsys, "--resume") == (
        f"{tmp_path / 'run' / 'checkpoints' / 'step-00000003'} was made with another vocabulary than {text} has now; "
        "use the same text, or start another run with another --out"
    )
    text.write_text(said + said[:40])
    assert f"was made with another text than {text} has now" in refused(tmp_path, changes, capsys, "--resume")


def test_resume_refuses_a_text_changed_in_place(tmp_path: Path, capsys) -> None:
    """Same path, size and vocabulary: only the digest of the ids tells."""
    text = write_text(tmp_path / "text.txt")
    train(tiny(tmp_path, {"train.steps": 3}))
    path, before = tmp_path / "run" / "checkpoints" / "step-00000003", content(tmp_path / "run")
    written = text.read_bytes()
    text.write_bytes(written[1:1000] + written[:1] + written[1000:])
    assert refused(tmp_path, {}, capsys, "--resume") == (
        f"{path} was made with another text than {text} has now (train changed); use the same text, or start "
        "another run with another --out"
    )
    assert content(tmp_path / "run") == before
    text.write_bytes(written)
    assert train(tiny(tmp_path, {"resume": True})).steps == 12
    rewrite(tmp_path / "run" / "checkpoints" / "step-00000012", lambda meta: meta.pop("data"))
    assert "has no digest of its training text" in refused(tmp_path, {}, capsys, "--resume")


RESIGNED: dict[str, tuple[Callable[[dict], object], str]] = {
    "no lanes": (lambda meta: meta.pop("lanes"), "KeyError('lanes')"),
    "lanes of another kind": (lambda meta: meta.update(lanes=7), "object has no attribute"),
    "position as text": (lambda meta: meta["lanes"].update(position="here"), "lanes.position is 'here'; expected a wh"),
    "position beyond the text": (lambda meta: meta["lanes"].update(position=10**9), "lanes.position is 1000000000; e"),
    "epoch": (lambda meta: meta["lanes"].update(epoch=-1), "lanes.epoch is -1; expected a whole number from 0 to "),
    "seen as text": (lambda meta: meta.update(seen="all"), "seen is 'all'; expected a whole number from 0 to 48"),
    "seen below 0": (lambda meta: meta.update(seen=-5), "seen is -5; expected a whole number from 0 to 48"),
    "seen too large": (lambda meta: meta.update(seen=2**62), f"seen is {2**62}; expected a whole number from 0 to 48"),
    "guard of another kind": (lambda meta: meta.update(guard=[]), "object has no attribute"),
    "guard's average": (lambda meta: meta["guard"].update(average="inf"), "guard.average is 'inf'; expected a finite"),
    "guard's steps": (lambda meta: meta["guard"].update(steps=0.5), "guard.steps is 0.5; expected a whole number"),
    "step": (lambda meta: meta["progress"].update(step=-(10**30)), "progress.step is -1000000000000000000000000000000"),
    "seconds": (lambda meta: meta["progress"].update(seconds=[]), "seconds is []; expected a number"),
    "diagnosis": (lambda meta: meta["diagnosis"].update(started_at=["far"]), "diagnosis.started_at is 'far'; expecte"),
    "optimiser": (lambda meta: meta["optimizer"].update(groups=5), "the saved optimiser state is damaged"),
    "configuration": (lambda meta: meta.update(config=None), "is not a run's checkpoint"),
}


def test_resigned_checkpoint_is_refused_in_one_sentence(tmp_path: Path, capsys) -> None:
    """Its digests fit, so only the values themselves can tell."""
    train(tiny(tmp_path, {"train.steps": 3}))
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    whole = (path / "meta.json").read_bytes()
    for name, (change, expected) in RESIGNED.items():
        rewrite(path, change)
        assert expected in refused(tmp_path, {}, capsys, "--resume"), name
        (path / "meta.json").write_bytes(whole)
    assert train(tiny(tmp_path, {"resume": True})).steps == 12


def test_resigned_checkpoint_with_other_tensors_is_refused(tmp_path: Path, capsys) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    moments = load_file(path / "optimizer.safetensors")
    odd = next(name for name in moments if name.endswith("/exp_avg"))
    for part, tensors, expected in (
        ("memory", {"0.hidden": torch.zeros(4, 3, 16)}, "memory has 1 tensors; expected 2 (see 1.hidden)"),
        ("memory", {f"{n}.hidden": torch.zeros(4, 3, 17) for n in (0, 1)}, "has shape [4, 3, 17]; expected [4, token"),
        ("optimizer", moments | {odd: torch.zeros(3)}, f"the saved optimiser has {odd} in shape [3]; expected "),
    ):
        (path / f"{part}.safetensors").unlink()
        files = folder.write_part(path, part, tensors)
        rewrite(path, lambda meta, files=files: meta["files"].update(files))
        assert expected in refused(tmp_path, {}, capsys, "--resume")


def rewrite(path: Path, change) -> None:
    meta = json.loads((path / "meta.json").read_text())
    change(meta)
    meta["sha256"] = folder._digest_of_meta(meta)
    (path / "meta.json").write_text(json.dumps(meta))


def test_checkpoint_of_a_newer_version(tmp_path: Path, capsys) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    rewrite(path, lambda meta: meta["config"]["model"]["attention"].update(max_spans=3))
    said = refused(tmp_path, {}, capsys, "--resume")
    assert said.startswith(
        f"unknown key model.attention.max_spans in {path}; did you mean model.attention.max_span? (known: max_span, "
    )
    rewrite(path, lambda meta: meta.update(format=2))
    assert refused(tmp_path, {}, capsys, "--resume") == (
        f"{path} was written by a newer spanformer (format 2; this one reads up to 1); upgrade spanformer"
    )


def test_checkpoint_of_an_older_version_has_the_defaults_of_newer_keys(tmp_path: Path) -> None:
    train(tiny(tmp_path, {"train.steps": 3}))
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    rewrite(path, lambda meta: meta["config"]["model"].pop("persistent"))
    assert train(tiny(tmp_path, {"resume": True})).steps == 12


def test_run_file_of_a_newer_version(tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[model.attention]\nmaxspan = 8\n")
    assert refusal(["train", str(file)], capsys).startswith(
        f"unknown key model.attention.maxspan in {file}; did you mean model.attention.max_span? (known: max_span, "
    )


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were not installed."""
    real = builtins.__import__

    def importer(name: str, *arguments):
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments)

    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", importer)


def test_without_tokenizers(tmp_path: Path, capsys, monkeypatch) -> None:
    without("tokenizers", monkeypatch)
    assert refused(tmp_path, {"data.tokens": "bpe"}, capsys) == (
        "tokens 'bpe' needs the package tokenizers; pip install 'spanformer[bpe]'"
    )


def test_without_tensorboard(tmp_path: Path, capsys, monkeypatch) -> None:
    without("tensorboard", monkeypatch)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    assert refused(tmp_path, {"train.tensorboard": "on"}, capsys) == (
        "train.tensorboard is 'on', but tensorboard is not installed; install it with: "
        "pip install 'spanformer[tensorboard]', or leave train.tensorboard at 'auto'"
    )
    assert not content(tmp_path / "run")
    assert train(tiny(tmp_path, {"train.tensorboard": "auto", "train.steps": 1})).steps == 1


def test_without_matplotlib_there_is_no_report(tmp_path: Path, capsys, monkeypatch) -> None:
    without("matplotlib", monkeypatch)
    main(["train", *options(tmp_path)])
    said = capsys.readouterr()
    assert "no report was drawn: pictures need matplotlib; install it with: pip install 'spanformer[plot]'" in said.out
    assert f"spanformer report {tmp_path / 'run'}" in said.out and "Traceback" not in said.err + said.out
