"""`spanformer eval`: the split of a text, in the model's own tokens, by either protocol."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from spanformer.cli.main import main
from spanformer.data import from_json, prepare
from spanformer.model.folder import write_folder
from spanformer.model.load import load, load_meta
from spanformer.train.evaluate import evaluate, evaluate_as_original
from spanformer.train.run import train
from support.tiny_runs import tiny, write_text

OTHER = "ein anderer Text, mit anderen Wörtern und Zeichen\nund Zeilen: abc def\n" * 60
"""of which the model knows few words, and not all characters"""


def said(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    main(arguments)
    return capsys.readouterr().out


def trained(folder: Path, tokens: str) -> str:
    vocab = {"data.vocab": 300} if tokens == "bpe" else {}
    train(tiny(folder, {"data.tokens": tokens, "train.steps": 3} | vocab))
    return str(folder / "run")


@pytest.mark.parametrize("protocol", ["every", "original"])
def test_eval_prints_the_result_of_evaluate(tmp_path: Path, capsys, protocol: str) -> None:
    run = trained(tmp_path, "byte")
    ids = prepare(tiny(tmp_path).data).splits["test"].ids
    out = said(["eval", run, "--protocol", protocol], capsys)
    if protocol == "every":
        score = evaluate(load(run), ids, block=16)
        assert score.tokens == len(ids) and f"\n{score.bits:.4f} bits per byte\n" in out
    else:
        score = evaluate_as_original(load(run), ids, block=16)
    assert out.startswith(
        f"test: {score.loss / math.log(2):.4f} bits per token, perplexity {score.perplexity:.2f} "
        f"({score.tokens:,} of {len(ids):,} tokens)"
    )


@pytest.mark.parametrize("tokens", ["byte", "char", "word", "bpe"])
def test_another_text_is_read_in_the_models_tokens(tmp_path: Path, capsys, tokens: str) -> None:
    run = trained(tmp_path, tokens)
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "valid", "test"):
        (other / f"{split}.txt").write_text(OTHER + split, encoding="utf-8")
    out = said(["eval", run, "--data", str(other)], capsys)
    vocab = from_json(load_meta(run)["vocab"])
    ids = vocab.encode((OTHER + "test").encode() if tokens == "byte" else OTHER + "test")
    units = len((OTHER + "test").encode()) if tokens == "bpe" else len(ids)
    score = evaluate(load(run), ids, units=units, block=16)
    assert f"({len(ids):,} of {len(ids):,} tokens)" in out
    found = re.search(r"^([\d.]+) bits per (byte|character|word)$", out, re.MULTILINE)
    assert found and float(found[1]) == pytest.approx(score.bits, abs=1e-4)
    unknown = 0 if vocab.unknown is None else int((ids == vocab.unknown).sum())
    assert (unknown > 0) == (tokens in ("char", "word"))
    assert (f"{unknown:,} of the tokens are not in the model's vocabulary" in out) == (unknown > 0)


def test_paper_protocol_reports_progress_and_accepts_bfloat16(tmp_path: Path) -> None:
    run = trained(tmp_path, "byte")
    ids, told = prepare(tiny(tmp_path).data).splits["test"].ids, []
    exact = evaluate_as_original(load(run), ids, block=16, on_progress=lambda *row: told.append(row))
    assert told[-1] == (exact.tokens, len(ids)) and told == sorted(told)
    rounded = evaluate_as_original(load(run), ids, block=16, dtype="bfloat16")
    assert 0 < abs(rounded.loss - exact.loss) < 0.05


def test_model_without_vocabulary_is_refused(tmp_path: Path, capsys) -> None:
    """As one that was imported: bytes would be read as its first words."""
    write_text(tmp_path / "text.txt")
    run = trained(tmp_path, "word")
    meta = load_meta(run)
    nameless = tmp_path / "nameless"
    write_folder(nameless, {"model": load(run).state_dict()}, {"model": meta["model"]})
    with pytest.raises(SystemExit):
        main(["eval", str(nameless), "--data", str(tmp_path / "text.txt")])
    size = meta["model"]["vocab"]
    assert f"the model has no vocabulary for its {size:,} tokens; expected 256 tokens" in (capsys.readouterr().err)
