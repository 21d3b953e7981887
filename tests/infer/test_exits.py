"""Generation with exits and their calibration, from Python and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.cli.main import main
from spanformer.data import overlap
from spanformer.depth import Confidence, Exits
from spanformer.depth.classifiers import Geometric
from spanformer.infer import Sampling, generate, generate_batch
from spanformer.infer.draft import Draft
from spanformer.infer.exits import GRID, calibrate, continuations, exits_by, rouge_l
from spanformer.model.config import DepthConfig, ModelConfig
from spanformer.model.lm import LM
from spanformer.train.run import train
from support.tiny_runs import tiny

PROMPTS = [np.random.default_rng(n).integers(0, 40, 7) for n in range(40)]


def model(**more: object) -> LM:
    torch.manual_seed(0)
    return LM(ModelConfig(vocab=40, dim=32, layers=4, heads=4, depth=DepthConfig(kind="exits"), **more)).eval()  # type: ignore[arg-type]


def test_rouge_l_is_the_f_measure_of_the_common_subsequence() -> None:
    assert rouge_l([1, 2, 3, 4], [1, 3, 4]) == pytest.approx(2 * 3 / 7)
    assert rouge_l([1, 2], [3, 4]) == 0 and rouge_l([5], [5]) == 1
    assert rouge_l([], []) == 1 and rouge_l([], [1]) == 0


def test_no_threshold_gives_the_same_tokens() -> None:
    lm = model()
    plain, layers = continuations(lm, PROMPTS[:5], 9, None)
    never, all_layers = continuations(lm, PROMPTS[:5], 9, Confidence("softmax"))
    assert plain == never and layers == all_layers == 4


def test_rows_of_a_batch_generate_as_if_alone() -> None:
    lm, confidence = model(), Confidence("saturation", 0.9)
    together, layers = continuations(lm, PROMPTS[:6], 8, confidence)
    alone = [continuations(lm, [prompt], 8, confidence) for prompt in PROMPTS[:6]]
    assert together == [texts[0] for texts, _ in alone]
    assert layers == pytest.approx(np.mean([mean for _, mean in alone]))
    assert 2 <= layers < 4


def test_calibration_stops_at_the_first_failure() -> None:
    lm = model()
    found = calibrate(
        lm, PROMPTS, PROMPTS, weights="w", measure="softmax", delta=0.25, epsilon=0.05, max_tokens=6
    )  # fmt: skip
    passed = [row["p"] <= 0.05 for row in found.tested]
    assert all(passed[:-1])
    if passed[-1]:
        assert found.threshold == GRID[-1] == found.tested[-1]["threshold"]
    else:
        assert found.threshold == (found.tested[-2]["threshold"] if len(passed) > 1 else None)
    layers = [row["layers"] for row in found.tested]
    assert layers == sorted(layers, reverse=True)


def test_full_text_of_a_calibration_is_not_the_classifiers() -> None:
    torch.manual_seed(0)
    depth = DepthConfig(kind="exits", classifier="geometric")
    lm = LM(ModelConfig(vocab=40, dim=32, layers=4, heads=4, depth=depth)).eval()
    assert isinstance(lm.depth, Exits) and isinstance(lm.depth.classifier, Geometric)
    torch.nn.init.constant_(lm.depth.classifier.score.bias, 20.0)  # it would leave after the first layer
    assert continuations(lm, PROMPTS[:3], 6, None)[1] == 1
    found = calibrate(lm, PROMPTS, PROMPTS, weights="w", measure="softmax", delta=0.25, max_tokens=6)
    assert found.tested[0]["layers"] == 4 and found.tested[0]["loss"] == 0  # no token of this model is so sure


def test_too_few_prompts_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ValueError, match=r"there are 5 prompts; delta 0.1 with epsilon 0.05 needs at least 29"):
        calibrate(model(), PROMPTS[:5], PROMPTS[:5], weights="w", measure="softmax")


def test_model_without_exits_is_refused() -> None:
    lm = LM(ModelConfig(vocab=40, dim=32, layers=2, heads=2))
    with pytest.raises(ValueError, match="the model has no exits; train one"), exits_by(lm, None):
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("layers", "tokens"), [(1, 1), (2, 3), (3, 8)])
def test_drafts_do_not_change_the_text(temperature: float, layers: int, tokens: int) -> None:
    lm, sampling = model().double(), Sampling(temperature)
    for prompt in PROMPTS[:3]:
        plain = [piece.id for piece in generate(lm, prompt, sampling=sampling, max_tokens=23, seed=3)]
        drafted = generate(lm, prompt, sampling=sampling, max_tokens=23, seed=3, draft=Draft(layers, tokens))
        assert [piece.id for piece in drafted] == plain
    assert lm.exits().fixed is None


def test_right_drafts_save_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model().double()
    with torch.no_grad():  # layers above the first change nothing, so every draft is right
        for block in lm.ordered_blocks()[1:]:
            block.attention.out.weight.zero_()
            for part in block.feedforward.parameters():  # type: ignore[union-attr]
                part.zero_()
    sizes: list[int] = []
    whole = lm.decode
    monkeypatch.setattr(lm, "decode", lambda x, *a, **k: sizes.append(x.shape[1]) or whole(x, *a, **k))
    pieces = list(generate(lm, PROMPTS[0], sampling=Sampling(0), max_tokens=21, draft=Draft(1, 4)))
    assert len(pieces) == 21 and sizes.count(5) == 4  # 4 checks of a token and 4 drafts


def test_bad_drafts_are_refused() -> None:
    with pytest.raises(ValueError, match="a draft leaves after layer 4; expected less than 4"):
        list(generate(model(), PROMPTS[0], draft=Draft(4, 2)))
    with pytest.raises(ValueError, match="expected 1 or more each"):
        Draft(0, 2)
    with pytest.raises(ValueError, match="draft takes one prompt at a time; got 2"):
        generate_batch(model(), PROMPTS[:2], draft=Draft(1, 2))


def test_confidence_is_restored() -> None:
    lm = model()
    assert isinstance(lm.depth, Exits)
    with pytest.raises(RuntimeError), exits_by(lm, Confidence("softmax", 0.1)):
        raise RuntimeError
    assert lm.depth.confidence is None


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits")
    changes = {"model.depth.kind": "exits", "model.layers": 3, "data.valid": 0.2, "data.test": 0.2}
    train(tiny(folder, changes))
    return folder / "run"


def call(*words: object) -> None:
    main([str(word) for word in words])


def test_calibrate_then_generate(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    call("calibrate-exits", run_folder, "--prompts", 30, "--prompt-tokens", 8, "--max-tokens", 5, "--delta", 0.3)
    said = capsys.readouterr().out
    assert "threshold    loss    p-value    layers" in said and "exits.json" in said
    call("generate", run_folder, "--prompt", "ab", "--temperature", 0, "--max-tokens", 8, "--exits", "calibrated")
    assert "of 3 per token" in capsys.readouterr().err
    call("generate", run_folder, "--prompt", "ab", "--max-tokens", 8, "--exits", "softmax:0.0")
    assert "layers: 1.00 of 3 per token" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--exits", "calibrated"], "guarantees greedy text only; add --temperature 0"),
        (["--exits", "softmax:7"], "threshold is 7.0; expected 0 … 1"),
        (["--exits", "soon"], "--exits is 'soon'; expected calibrated, or a measure"),
        (["--exits", "softmax:0.5", "--lookup", "3"], "--exits decides token by token"),
        (["--draft", "3"], "--draft is '3'; expected LAYERS:TOKENS"),
    ],
)
def test_bad_options_are_one_sentence(
    run_folder: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        call("generate", run_folder, "--prompt", "ab", *words)
    assert sentence in capsys.readouterr().err


def test_calibration_of_other_weights_is_refused(run_folder: Path) -> None:
    from spanformer.infer.exits import load
    from spanformer.model.load import model_folder

    folder = model_folder(run_folder)
    (folder / "exits.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="has no calibrated exits; run spanformer calibrate-exits"):
        load(folder, "x")
    (folder / "exits.json").write_text(json.dumps({"weights": "y"}))
    with pytest.raises(ValueError, match="cannot be read"):
        load(folder, "x")


def test_training_split_is_refused(run_folder: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        call("calibrate-exits", run_folder, "--split", "train")
    assert "whose text trained the exits" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_training_text_under_another_name_is_refused(
    run_folder: Path, tmp_path: Path, split: str, capsys: pytest.CaptureFixture
) -> None:
    """A copy of the corpus, cut differently, so that each split holds training text."""
    text = (run_folder.parent / "text.txt").read_bytes()
    (tmp_path / "other.txt").write_bytes(text[: len(text) // 2])
    small = ["--prompts", 12, "--prompt-tokens", 6, "--max-tokens", 4, "--delta", 0.3]
    with pytest.raises(SystemExit):
        call("calibrate-exits", run_folder, "--data", tmp_path / "other.txt", "--split", split, *small)
    said = " ".join(capsys.readouterr().err.split())
    assert "trained the exits: " in said and "give a text that the model has not seen" in said


def test_test_split_of_a_copy_of_the_corpus_is_taken(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_bytes((run_folder.parent / "text.txt").read_bytes())
    small = ["--prompts", 12, "--prompt-tokens", 6, "--max-tokens", 4, "--delta", 0.3]
    call("calibrate-exits", run_folder, "--data", tmp_path / "copy.txt", *small)


def test_passages_are_found_at_whole_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.arange(2000, dtype=np.uint16)
    shifted = np.frombuffer(text.tobytes()[1:41], np.uint16)  # its bytes occur, between tokens
    monkeypatch.setattr(overlap, "PART", 64)
    passages = [text[50:90], text[127:128], text[3:9][::-1], shifted, text[-5:]]
    assert overlap.found_in(text, passages) == [0, 1, 4]


@pytest.mark.parametrize("layer", [0, 5, -1])
def test_exit_beyond_the_last_layer_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"fixed is {layer}; expected an exit after layer 1 … 4, the last, or None"):
        model().exits().fixed = layer
