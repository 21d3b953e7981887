"""`spanformer datastore` and `--datastore`: from a text to predictions, for our models and for Hugging Face's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from spanformer import LM, ModelConfig
from spanformer.cli.main import main
from spanformer.cli.retrieval import with_datastore
from spanformer.core.fields import as_dict
from spanformer.data import Bytes
from spanformer.model.config import AttentionConfig
from spanformer.model.folder import write_folder
from spanformer.model.load import load
from spanformer.retrieve import Store
from spanformer.retrieve.mixture import mixed_nll, read_settings
from support.byte_llama import save_byte_llama
from support.refusals import refusal

MODEL = ModelConfig(vocab=256, dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=32, ramp=4.0, init=0.3))
TEXT = "".join(f"the cat number {n % 7} sat on the mat number {n % 5}\n" for n in range(40))
OTHER = "".join(f"the cat number {n % 5} saw the mat of dog {n % 3}\n" for n in range(12))


def save(folder: Path, seed: int = 0) -> str:
    torch.manual_seed(seed)
    write_folder(folder, {"model": LM(MODEL).state_dict()}, {"model": as_dict(MODEL), "vocab": Bytes().to_json()})
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, its datastore with fitted settings, and texts."""
    folder = tmp_path_factory.mktemp("made")
    for name, text in (("text", TEXT), ("other", OTHER)):
        (folder / f"{name}.txt").write_text(text)
    model, store = save(folder / "model"), str(folder / "store")
    main(["datastore", "build", model, "--data", str(folder / "text.txt"), "--out", store, "--keys", "float32"])
    main(["datastore", "fit", model, store, "--data", str(folder / "other.txt"), "--k", "8", "--adaptive"])
    return folder, model, store


def bits(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"(\d\.\d{4}) (?:bits|with|→|per)", said)]


def test_build_says_what_it_made(made, capsys) -> None:
    folder, model, store = made
    capsys.readouterr()
    main(["datastore", "build", model, "--data", str(folder / "text.txt"), "--out", store, "--keys", "float32"])
    said = capsys.readouterr().out
    assert f"0 entries added, {len(TEXT) - 1:,} were there" in said and "datastore fit" in said
    assert len(Store(store)) == len(TEXT) - 1


def test_fitting_helps_and_is_written(made, capsys) -> None:
    folder, model, store = made
    settings = read_settings(Path(store))
    assert 0 < settings.share < 1 and settings.k == 8 and settings.fitted_on["entries"] == len(TEXT) - 1
    capsys.readouterr()
    main(["datastore", "eval", model, store, "--data", str(folder / "other.txt"), "--share", str(settings.share)])
    said = capsys.readouterr().out
    without, with_store = bits(said)[:2]
    assert with_store < 0.9 * without and "0 % of searches skipped" in said
    main(["datastore", "eval", model, store, "--data", str(folder / "other.txt"), "--share", "0"])
    same = bits(capsys.readouterr().out)
    assert same[0] == same[1] == without


def test_score_eval_and_generate_ask_the_store(made, capsys) -> None:
    folder, model, store = made
    other = str(folder / "other.txt")
    capsys.readouterr()
    for command in (["score", model, other], ["eval", model, "--data", other, "--split", "train"]):
        main(command)
        plain = bits(capsys.readouterr().out)
        main([*command, "--datastore", store])
        said = capsys.readouterr().out
        assert bits(said)[0] < 0.95 * plain[0] and "datastore: 1,6" in said, said
    main(["generate", model, "--prompt", "the cat number 3 sat on", "--temperature", "0", "--max-tokens", "8",
          "--datastore", store])  # fmt: skip
    said = capsys.readouterr()
    assert len(said.out) >= 8 and "datastore: " in said.err


def test_explain_prints_neighbours_with_their_text(made, capsys) -> None:
    _, model, store = made
    capsys.readouterr()
    main(["datastore", "explain", model, store, "--prompt", "the cat number 3 sat on", "--show", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model alone:") and lines[1].startswith("with datastore:")
    assert len(lines) == 6 and all("→" in line and "distance" in line for line in lines[3:])


def test_a_hugging_face_model_has_a_datastore(tmp_path: Path, capsys) -> None:
    save_byte_llama(tmp_path / "llama", 512)
    for name, text in (("text", TEXT), ("other", OTHER)):
        (tmp_path / f"{name}.txt").write_text(text)
    model, store = str(tmp_path / "llama"), str(tmp_path / "store")
    common = ["--dtype", "float32"]
    main(
        ["datastore", "build", model, "--data", str(tmp_path / "text.txt"), "--out", store, "--context", "64", *common]
    )
    main(["datastore", "fit", model, store, "--data", str(tmp_path / "other.txt"), *common])
    main(["datastore", "eval", model, store, "--data", str(tmp_path / "other.txt"), *common])
    main(["datastore", "explain", model, store, "--prompt", "the cat", *common])
    said = capsys.readouterr().out
    assert "bits per byte without" in said and "→" in said
    with_store = re.search(r"(\d\.\d{4}) bits per byte without, (\d\.\d{4}) with", said)
    assert with_store and float(with_store[2]) < float(with_store[1])


def test_contexts_that_are_not_finite_are_counted(made, caplog) -> None:
    _, model, store = made
    lm = load(model)
    with with_datastore(lm, Bytes(), store, model) as retrieval:
        assert retrieval is not None
        keys = torch.zeros(3, lm.config.dim)
        keys[1, 2] = torch.nan
        mixed_nll(retrieval, keys, torch.ones(3), torch.ones(3, dtype=torch.int64), torch.zeros(3, lm.config.vocab))
    assert "1 contexts have keys that are not finite; their predictions are the model's alone" in caplog.text


def test_bad_input_is_refused(made, tmp_path: Path, capsys) -> None:
    folder, model, store = made
    text, other = str(folder / "text.txt"), str(folder / "other.txt")
    twin = save(tmp_path / "twin", seed=1)
    cases = {
        "is in the datastore, where it would find itself": ["datastore", "fit", model, store, "--data", text],
        "with another set of weights": ["score", twin, other, "--datastore", store],
        f"{tmp_path} is no datastore": ["score", model, other, "--datastore", str(tmp_path)],
        "share is 2.0; expected λ": ["datastore", "eval", model, store, "--data", other, "--share", "2"],
        "temperature is -1.0": ["datastore", "eval", model, store, "--data", other, "--temperature", "-1"],
        "k is -3": ["datastore", "eval", model, store, "--data", other, "--k", "-3"],
        "names no text": ["datastore", "build", model, "--data", str(tmp_path / "x"), "--out", str(tmp_path / "s")],
        "dtype is bfloat16 with a datastore": ["eval", model, "--datastore", store, "--dtype", "bfloat16"],
        "lists is 160 for": ["datastore", "index", store],
        "limit is -1; expected a number": ["datastore", "eval", model, store, "--data", other, "--limit", "-1"],
        "the prompt is empty": ["datastore", "explain", model, store, "--prompt", ""],
    }
    for sentence, arguments in cases.items():
        assert sentence in refusal(arguments, capsys)
    (tmp_path / "short.txt").write_text("a")
    for command in ("build", "fit", "eval"):
        place = ["--out", store] if command == "build" else [store]
        said = refusal(["datastore", command, model, *place, "--data", str(tmp_path / "short.txt")], capsys)
        assert "short.txt has 1 tokens; expected 2 or more: a context and the token after it" in said
    main(["datastore", "build", model, "--data", text, "--out", str(tmp_path / "raw")])
    assert "has no fit.json" in refusal(["score", model, other, "--datastore", str(tmp_path / "raw")], capsys)
