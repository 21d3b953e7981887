"""Pairs and masked tokens in the loop of language models: what is learned, evaluated, resumed and refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spanformer import Encoder, Seq2Seq, load
from spanformer.cli.main import main
from spanformer.core.events import EvalEvent
from spanformer.data import Pairs, prepare
from spanformer.data.numbers import words
from spanformer.infer import answer
from spanformer.model.load import load_any
from spanformer.report.events import read_run
from spanformer.report.page import write_report
from spanformer.report.spans_text import summary
from spanformer.train.distributed import World
from spanformer.train.evaluate import evaluate_masked, evaluate_pairs
from spanformer.train.loop import TrainingLoop
from spanformer.train.objective import make_objective
from spanformer.train.run import train, with_vocab
from spanformer.train.step import Batch, backward
from support.same_runs import assert_same_checkpoint, assert_same_events
from support.tiny_runs import tiny

PAIRS: dict[str, Any] = {
    "model.kind": "seq2seq", "model.encoder.attention.max_span": 8, "model.attention.dropout": 0.1, "train.batch": 8,
    "train.block": 32, "data.tokens": "char", "train.eval_tokens": 200,
}  # fmt: skip
MASKED: dict[str, Any] = {"model.kind": "encoder", "model.attention.dropout": 0.1}
SENTENCES: dict[str, Any] = MASKED | {
    "model.attention.kind": "etc(3, 4)", "model.position.kind": "none", "train.cpc_mask_ratio": 0.3
}  # fmt: skip
KINDS = {"seq2seq": PAIRS, "encoder": MASKED}
ALONE = World(0, 1, torch.device("cpu"), "one")


def changes(kind: str, folder: Path, more: dict[str, Any] | None = None) -> dict[str, Any]:
    if kind != "seq2seq":
        return {"encoder": MASKED, "etc": SENTENCES}[kind] | (more or {})
    texts = folder / "pairs"
    if not texts.exists():
        texts.mkdir()
        for split, some in (("train", range(0, 300, 2)), ("valid", range(1, 41, 2)), ("test", range(41, 81, 2))):
            (texts / f"{split}.tsv").write_text("".join(f"{n}\t{words(n)}\n" for n in some))
    return PAIRS | {"data.source": str(texts)} | (more or {})


@pytest.mark.parametrize("kind", [*KINDS, "etc"])
def test_objective_resumes_exactly(tmp_path: Path, kind: str) -> None:
    train(tiny(tmp_path, changes(kind, tmp_path, {"out": str(tmp_path / "straight")})))
    train(tiny(tmp_path, changes(kind, tmp_path, {"train.steps": 6})))
    finished = train(tiny(tmp_path, changes(kind, tmp_path, {"resume": True})))
    assert (finished.reason, finished.steps) == ("all steps done", 12)
    run, straight = read_run(tmp_path / "run"), read_run(tmp_path / "straight")
    assert_same_events(run, straight)
    assert [row.exact for row in run.evals] == [row.exact for row in straight.evals]
    assert_same_checkpoint(tmp_path / "run", tmp_path / "straight", memory=False)


@pytest.mark.parametrize("kind", KINDS)
def test_grad_accum_steps_equal_one_batch(tmp_path: Path, kind: str) -> None:
    """Pieces may hold different numbers of tokens that count."""
    config = tiny(tmp_path, changes(kind, tmp_path, {"model.attention.dropout": 0.0}))
    data = prepare(config.data)
    run = TrainingLoop(with_vocab(config, data), data, ALONE, tmp_path / "run", None)
    model, drawn = run.model.double(), run.objective.draw()
    grads = []
    for micro in (1, 2, 4):
        model.zero_grad()
        losses, state = backward(model, model, ALONE, drawn, None, grad_accum_steps=micro, dtype="float32")
        grads.append([losses.loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
        assert state is None
    for other in grads[1:]:
        for a, b in zip(grads[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    output = model(**drawn.arguments)
    if kind == "seq2seq":
        assert drawn.counted is not None and not bool(drawn.counted.all())
        nll = output.nll[drawn.counted]
        assert len(nll) == drawn.tokens
    else:
        nll = output.nll
    torch.testing.assert_close(grads[0][0], nll.mean(), rtol=1e-9, atol=0)


def test_several_processes_see_the_tokens_of_one(tmp_path: Path) -> None:
    """The rows of two processes are those of one; each token counts alike, however they fall."""
    config = tiny(tmp_path, changes("seq2seq", tmp_path, {"model.attention.dropout": 0.0, "model.vocab": 60}))
    data = prepare(config.data)
    run = TrainingLoop(with_vocab(config, data), data, ALONE, tmp_path / "run", None)
    run.model.double()
    whole = backward(run.model, run.model, ALONE, run.objective.draw(), None, grad_accum_steps=1, dtype="float32")[
        0
    ].loss
    two = World(0, 2, torch.device("cpu"), "ddp")
    parts = []
    for rank in range(2):
        half: Batch = make_objective(run.data, run.config, World(rank, 2, two.device, "ddp").rows(8)).draw()
        assert len(half.arguments["x"]) == 4
        parts.append(backward(run.model, run.model, two, half, None, grad_accum_steps=1, dtype="float32")[0].loss)
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole, rtol=1e-9, atol=0)


def test_masks_follow_from_seed_and_place(tmp_path: Path) -> None:
    config = tiny(tmp_path, MASKED | {"model.vocab": 257})
    data = prepare(config.data)
    one, two = (make_objective(data, config, rows) for rows in (slice(0, 4), slice(2, 4)))
    first, second = [one.draw() for _ in range(2)], [two.draw() for _ in range(2)]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.arguments["at"][2:], b.arguments["at"])
        assert torch.equal(a.arguments["x"][2:], b.arguments["x"])
    assert not torch.equal(first[0].arguments["at"], first[1].arguments["at"])
    assert first[0].arguments["at"].shape == (4, round(0.15 * 16)) and first[0].tokens == 4 * 16
    assert int(first[0].arguments["x"].max()) == 256


@pytest.mark.slow
def test_segments_are_masked_for_etc(tmp_path: Path) -> None:
    config = tiny(tmp_path, SENTENCES | {"model.vocab": 257})
    data = prepare(config.data)
    plain = make_objective(data, tiny(tmp_path, MASKED | {"model.vocab": 257}), slice(0, 4)).draw().arguments
    found = make_objective(data, config, slice(0, 4)).draw().arguments
    assert torch.equal(found["at"], plain["at"]) and torch.equal(found["targets"], plain["targets"])
    assert found["picked"].shape == (4, 2) and found["alone"].shape == (4, 2, 4)  # two at least, of four
    segments = torch.arange(16).div(4, rounding_mode="floor")
    hidden = (segments == found["picked"][..., None]).any(1)
    assert torch.equal(found["x"], plain["x"].masked_fill(hidden, 256))
    train(tiny(tmp_path, SENTENCES | {"train.measure": True}))
    run = read_run(tmp_path / "run")
    assert run.steps[0].penalty > 0.25 * math.log(8) / 2  # eight segments are told apart in a batch
    assert run.costs[-1].flops["learned"] > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.attention.kind": "window(8)"}, "not every layer has global tokens"),
        ({"model.attention.kind": "etc(3, 16)"}, "masks whole segments of 16 tokens, but train.block is 16"),
    ],
)
def test_segments_without_global_tokens_are_refused(tmp_path: Path, changed: dict, message: str) -> None:
    config = tiny(tmp_path, SENTENCES | {"model.vocab": 257} | changed)
    with pytest.raises(ValueError, match=message):
        make_objective(prepare(config.data), config, slice(0, 4))


def test_segments_are_for_encoders(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"train.cpc_mask_ratio is 0.3 and model.kind is 'lm'; expected 0, since only encoders"
    ):
        tiny(tmp_path, {"train.cpc_mask_ratio": 0.3})


@pytest.mark.slow
def test_exact_match_is_what_greedy_decoding_writes(tmp_path: Path) -> None:
    """Trained until some answers are right and some are not."""
    more = {"train.steps": 120, "optim.lr": 0.01, "model.attention.dropout": 0.0, "train.eval_every": 0,
            "train.save_every": 0, "model.dim": 32, "train.log_every": 120, "train.eval_tokens": 0}  # fmt: skip
    found = changes("seq2seq", tmp_path, more)
    (tmp_path / "pairs" / "train.tsv").write_text("".join(f"{n}\t{words(n)}\n" for n in range(40)))
    config = tiny(tmp_path, found)
    train(config)
    model = load(tmp_path / "run", Seq2Seq)
    data = prepare(config.data)
    pairs = Pairs(data.splits["train"].ids, data.vocab, begin=model.begin, end=model.end, longest=32, name="train")
    rows = [pairs.texts(row) for row in range(len(pairs))]
    answers = answer(model, [source.astype(np.int64) for source, _ in rows], max_tokens=32)
    right = [found == target.tolist() for found, (_, target) in zip(answers, rows, strict=True)]
    assert 0.1 < sum(right) / len(right) < 1
    score = evaluate_pairs(model, pairs, batch=7)
    assert score.exact == sum(right) / len(right) and score.tokens == pairs.tokens
    some = evaluate_pairs(model, pairs, limit=10)
    assert some.exact == sum(right[:10]) / 10 and some.tokens == int(pairs.lengths[:10, 1].sum())
    texts = answer(model, [data.vocab.decode(source) for source, _ in rows[:3]], vocab=data.vocab, max_tokens=32)
    assert texts == answers[:3]
    assert answer(model, [rows[0][0].astype(np.int64)], max_tokens=1)[0] == answers[0][:1]

    def score_of(source: np.ndarray, written: list[int]) -> float:
        """log-probability per token of an answer with its end."""
        ids = torch.tensor([[*source.tolist(), model.end]])
        x, y = torch.tensor([[model.begin, *written]]), torch.tensor([[*written, model.end]])
        return -float(model(ids, x, targets=y).nll.mean())

    for source, _ in rows[:6]:
        (greedy,), (one, *_), (best,) = (
            answer(model, [source.astype(np.int64)] * n, max_tokens=32, beams=beams)
            for n, beams in ((1, 1), (2, 2), (1, 5))
        )
        with torch.no_grad():
            assert score_of(source, best) >= score_of(source, greedy) - 1e-6
            assert score_of(source, one) >= score_of(source, greedy) - 1e-6


def test_encoder_is_evaluated_on_the_same_masks(tmp_path: Path) -> None:
    config = tiny(tmp_path, MASKED | {"train.steps": 3})
    train(config)
    model = load(tmp_path / "run", Encoder)
    ids = prepare(config.data).splits["valid"].ids[:400]
    scores = [evaluate_masked(model, ids, share=0.15, vocab=256, block=16, batch=batch) for batch in (4, 25)]
    assert scores[0].exact == scores[1].exact and scores[0].tokens == 25 * 2
    assert math.isclose(scores[0].nats, scores[1].nats, rel_tol=1e-6)
    last = read_run(tmp_path / "run").evals[-1]
    assert math.isclose(last.loss, scores[0].loss, rel_tol=1e-6) and last.exact == scores[0].exact


@pytest.mark.parametrize("kind", KINDS)
def test_commands(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture) -> None:
    seen: list[Any] = []
    train(tiny(tmp_path, changes(kind, tmp_path, {"train.steps": 3})), watch=seen.append)
    out = str(tmp_path / "run")
    assert not any(math.isnan(event.exact) for event in seen if isinstance(event, EvalEvent))
    name = {"seq2seq": "exact match", "encoder": "masked tokens right"}[kind]
    run = read_run(tmp_path / "run")
    assert run.start.objective == kind and f"{name.capitalize()}: " in summary(run) and "FLOPs" not in summary(run)
    assert name in write_report([tmp_path / "run"], tmp_path / "report").read_text()
    main(["eval", out])
    said = capsys.readouterr().out
    assert said.startswith("test: exact match 0.00 % (0 of 20 pairs; " if kind == "seq2seq" else "test: ")
    assert "bits per" in said and name.split()[0] in said
    main(["spans", out])
    assert "layer 2" in capsys.readouterr().out
    for arguments, sentence in (
        (["score", out, __file__], f"holds a model of kind '{kind}'; expected LM"),
        (["eval", out, "--lanes", "2"], f"the model is of kind '{kind}'; --protocol and --lanes are for language"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert sentence in capsys.readouterr().err
    if kind == "seq2seq":
        main(["generate", out, "--prompt", "12", "7", "--beams", "2", "--max-tokens", "4"])
        assert len(capsys.readouterr().out.splitlines()) == 2
        main(["eval", out, "--beams", "2", "--limit", "2"])
        assert "of 2 pairs; 2 beams" in capsys.readouterr().out
        refused = {
            ("--prompt", "1", "--top-k", "3"): "--top-k is for language models; with an encoder–decoder use --prompt",
            ("--prompt", "Q"): "the vocabulary lacks the character 'Q'",
        }
    else:
        refused = {("--prompt", "x"): "holds a model of kind 'encoder', which cannot generate"}
    for arguments, sentence in refused.items():
        with pytest.raises(SystemExit):
            main(["generate", out, *arguments])
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"holds a model of kind '{kind}'; expected LM$"):
        load(out)
    assert load_any(out).config.kind == kind


REFUSED = {
    "a file": (
        "seq2seq", {"data.source": __file__},
        "data.source is the file .*, whose splits may cut a pair in two; expected 'numbers', or a folder with files ",
    ),
    "words": ("seq2seq", {"data.tokens": "word"}, "tokens is 'word'; expected 'char' or 'byte' for pairs of texts"),
    "too long": ("seq2seq", {"train.block": 12}, "of train has a text of .* tokens with its end; train.block is 12"),
    "too few": ("seq2seq", {"train.batch": 500}, "there are 150 pairs to train on; expected at least a batch of 500"),
    "vocab": ("seq2seq", {"model.vocab": 30}, "the data has 33 tokens and the model adds 2, so expected at"),
    "share": ("encoder", {"train.masked": 0.0}, "train.masked is 0.0; expected a share of the tokens, above 0 and at "),
    "lm": ("encoder", {"model.kind": "lm", "model.encoder.layers": 3}, "model.encoder is set, and model.kind is 'lm'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(tmp_path: Path, name: str) -> None:
    kind, more, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        train(tiny(tmp_path, changes(kind, tmp_path, more)))


def test_another_kind_is_not_continued(tmp_path: Path) -> None:
    train(tiny(tmp_path, MASKED | {"train.steps": 3, "model.vocab": 300}))
    with pytest.raises(ValueError, match=r"was made with model.kind = 'encoder', but this run has 'lm'"):
        train(tiny(tmp_path, {"resume": True, "model.vocab": 300}))
