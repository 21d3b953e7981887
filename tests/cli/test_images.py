"""A model of images: trained, resumed, evaluated in bits per dimension, drawn from, and completing half an image."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")

from spanformer.cli.main import main
from spanformer.data import prepare
from spanformer.model.load import load_any
from spanformer.report.events import read_run
from spanformer.train.evaluate import evaluate_images
from spanformer.train.objective import make_objective
from spanformer.train.run import train
from support.images import fake_digits, write_png
from support.same_runs import assert_same_checkpoint, assert_same_events
from support.tiny_runs import tiny

IMAGES = {"data.tokens": "pixel", "data.source": "digits", "data.valid": 0.1, "data.test": 0.2, "train.block": 64,
          "train.eval_tokens": 0, "model.position.kind": "learned", "model.position.length": 64,
          "model.attention.max_span": 64}  # fmt: skip
KINDS = ["full", "adaptive_span", "image_1d(16, 16)", "image_2d(8, 2, 4, 2, 2)", "strided(8)"]


@pytest.fixture(autouse=True)
def digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    fake_digits(tmp_path / "fake", monkeypatch)


def refused(capsys: Any, *words: object) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_bits_per_dimension_by_hand(tmp_path: Path, kind: str) -> None:
    changes = IMAGES | {"model.attention.kind": kind, "train.steps": 2, "train.eval_every": 0}
    result = train(tiny(tmp_path, changes))
    config = tiny(tmp_path, changes)
    data, model = prepare(config.data), load_any(tmp_path / "run").eval().requires_grad_(False)
    blocks = [(y, x) for top in (0, 2, 4, 6) for left in (0, 4) for y in (top, top + 1) for x in range(left, left + 4)]
    order = [8 * y + x for y, x in blocks] if "2d" in kind else range(64)
    nats = []
    for image in data.splits["valid"].ids.reshape(-1, 64).astype(np.int64):
        ids = torch.tensor([17, *(image[n] for n in order)])
        logits = model(ids[None, :-1]).logits[0].double()
        nats.append(-float(logits.log_softmax(-1)[torch.arange(64), ids[1:]].sum()))
    assert result.bits == pytest.approx(sum(nats) / len(nats) / 64 / math.log(2), rel=1e-4)
    run = read_run(tmp_path / "run")
    assert run.start.bits_unit == "dimension" and run.start.objective == "image" and math.isnan(run.evals[-1].exact)


def test_a_pixel_depends_on_earlier_ones_only_and_rows_are_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path, IMAGES | {"train.batch": 3})
    data = prepare(config.data)
    batch = make_objective(data, config, slice(0, 3)).draw()
    x, y = batch.arguments["x"], batch.arguments["targets"]
    assert x.shape == y.shape == (3, 64) and bool((x[:, 0] == 17).all()) and bool((x[:, 1:] == y[:, :-1]).all())
    assert batch.whole and batch.reset and batch.tokens == 192


def test_resumed_exactly(tmp_path: Path) -> None:
    train(tiny(tmp_path, IMAGES | {"out": str(tmp_path / "straight")}))
    train(tiny(tmp_path, IMAGES | {"train.steps": 6}))
    train(tiny(tmp_path, IMAGES | {"resume": True}))
    assert_same_events(read_run(tmp_path / "run"), read_run(tmp_path / "straight"))
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight")


def test_samples_and_completions_are_written(tmp_path: Path, capsys: Any) -> None:
    """A model that learned vertical stripes continues them."""
    longer = {"train.steps": 150, "train.batch": 8, "train.save_every": 0, "train.eval_every": 0, "optim.lr": 0.02}
    train(tiny(tmp_path, IMAGES | longer | {"model.attention.kind": "full"}))
    run, seed = tmp_path / "run", ("--seed", "1")
    main(["generate", str(run), *seed])
    main(["generate", str(run), "--image", "test", "--images", "2", *seed])
    said = capsys.readouterr().out
    assert f"16 images: {run}/samples.png" in said and f"2 images, each completed 3 times: {run}/completions" in said
    assert all((run / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("samples", "completions"))
    stripes = write_png(tmp_path / "one.png", np.tile([0, 255] * 4, (8, 1)))
    main(["generate", str(run), "--image", str(stripes), "--out", str(tmp_path / "new" / "one.png"), *seed])
    assert (tmp_path / "new" / "one.png").is_file()
    main(["eval", str(run), "--split", "test"])
    shown = capsys.readouterr().out
    assert "(768 values of 12 images)" in shown
    bits = float(shown.partition("test: ")[2].split()[0])
    data = prepare(tiny(tmp_path, IMAGES).data)
    model = load_any(run)
    images = data.splits["test"].ids.reshape(-1, 64)
    assert bits == pytest.approx(evaluate_images(model, data.vocab, images).bits, abs=1e-4)  # pyright: ignore
    assert bits < 1.5, "stripes are learned"


@pytest.mark.parametrize("kind", ["full", "image_2d(8, 2, 4, 2, 2)"])
def test_a_completion_begins_with_what_was_given(tmp_path: Path, kind: str) -> None:
    from spanformer.cli.generate import GenerateOptions
    from spanformer.cli.generate_images import sample

    changes = IMAGES | {"train.steps": 1, "train.eval_every": 0, "model.attention.kind": kind}
    train(tiny(tmp_path, changes))
    data, model = prepare(tiny(tmp_path, IMAGES).data), load_any(tmp_path / "run")
    given = data.splits["test"].ids.reshape(-1, 64)[:3, :32].astype(np.int64)
    options = GenerateOptions(str(tmp_path / "run"), seed=3)
    found = sample(model, data.vocab, given, options, lambda *_: None)  # pyright: ignore
    assert found.shape == (3, 64) and np.array_equal(found[:, :32], given) and found.max() <= 16
    again = sample(model, data.vocab, given, options, lambda *_: None)  # pyright: ignore
    assert np.array_equal(found, again)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ValueError, match=r"train.block is 63; an image has 64 values \(8 × 8 pixels of 1\)"):
        train(tiny(tmp_path, IMAGES | {"train.block": 63, "out": str(tmp_path / "a")}))
    with pytest.raises(ValueError, match=r"data.tokens is 'pixel' and model.kind is 'encoder'; expected 'lm'"):
        tiny(tmp_path, IMAGES | {"model.kind": "encoder"})
    tall = "image_2d(8, 8, 4, 2, 2)"
    train(tiny(tmp_path, IMAGES | {"train.steps": 1, "train.eval_every": 0, "model.attention.kind": tall}))
    run = tmp_path / "run"
    assert "image_2d whose `high` divides 4, or no --image" in refused(capsys, "generate", run, "--image", "test")
    for kind, said in (
        ("image_2d(9, 2, 3, 2, 2)", "with width 9, and a line of the images has 8 values"),
        ("2 image_2d(8, 2, 4, 2, 2) + 2 image_2d(8, 4, 4, 2, 2)", "expected one kind of block"),
    ):
        with pytest.raises(ValueError, match=said):
            train(tiny(tmp_path, IMAGES | {"model.attention.kind": kind, "model.heads": 4, "out": str(tmp_path / "b")}))
    assert "--prompt is for text, and" in refused(capsys, "generate", run, "--prompt", "a")
    assert "images is 13; expected at most 12" in refused(capsys, "generate", run, "--image", "test", "--images", 13)
    assert "expected the path of a PNG file" in refused(capsys, "generate", run, "--out", tmp_path / "a.jpg")
    assert "images is -1; expected 1 or more" in refused(capsys, "generate", run, "--images", -1)
    assert "omit --images" in refused(capsys, "generate", run, "--image", "a.png", "--images", 2)
    wide = write_png(tmp_path / "wide.png", np.zeros((8, 9)))
    assert "wide.png has 9 × 8 pixels; expected 8 × 8" in refused(capsys, "generate", run, "--image", wide)
    assert "is not a PNG file" in refused(capsys, "generate", run, "--image", tmp_path / "none.png")
    assert "the data is images; --protocol and --lanes" in refused(capsys, "eval", run, "--lanes", 2)
    train(tiny(tmp_path, {"train.steps": 1, "out": str(tmp_path / "text")}))
    error = refused(capsys, "generate", tmp_path / "text", "--image", "test")
    assert "--image is for models of images, and" in error and "reads text; omit it" in error
