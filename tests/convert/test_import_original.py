"""Checkpoints of the adaptive-span paper's code as model folders: made like theirs, imported, loaded, compared."""

from __future__ import annotations

import pickle
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import spanformer
from spanformer.cli.main import main
from spanformer.convert.original import convert, import_original, read_checkpoint
from spanformer.convert.original_settings import Settings
from spanformer.model.config import AttentionConfig, EmbeddingConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.folder import read_meta
from spanformer.model.load import load_meta
from support.original_model import Dense, Shape, random_state

PLAIN = Shape(span=50, ratios=(0.25, 0.0, 1.0))
WORDS = Shape(vocab=43, dim=26, heads=2, span=40, ratios=(0.513, 0.0123), cutoffs=(11, 29), divisor=3, tied=True)
SHAPES = {
    "plain": PLAIN,
    "no spans": replace(PLAIN, ratios=None),
    "persistent": replace(PLAIN, persistent=7),
    "words, tied": WORDS,
    "words": replace(WORDS, tied=False),
    "persistent words": replace(WORDS, persistent=5),
}


def narrow(shape: Shape) -> dict[str, Tensor]:
    return {key: t.float() for key, t in random_state(shape).items()}


def checkpoint_of(shape: Shape) -> dict:
    """What their code saves: the state of a model in torch's data-parallel wrapper, and of all around it."""
    model = OrderedDict((f"module.{key}", t) for key, t in narrow(shape).items())
    model._metadata = OrderedDict({"": {"version": 1}})  # pyright: ignore[reportAttributeAccessIssue]
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adagrad([weight], lr=0.07)
    weight.sum().backward()
    optimizer.step()
    logger = {"loss_train": [1.5, 1.25], "avg_span_l0": [3.0, 4.0]}
    return {
        "iter_no": 599, "model": model, "logger": logger, "optimizer": optimizer.state_dict(), "scheduler_iter": 600000
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "enwik8.pt"
    torch.save(checkpoint_of(PLAIN), path)
    return path


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 1.6"])
def test_imported_checkpoint_equals_the_equations(name: str, zipped: bool, tmp_path: Path) -> None:
    shape = SHAPES[name]
    torch.save(checkpoint_of(shape), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    import_original(tmp_path / "a.pt", tmp_path / "out")
    lm = spanformer.load(tmp_path / "out")
    assert not lm.training
    text = torch.randint(0, shape.vocab, (2, 61), generator=torch.Generator().manual_seed(1))
    dense = Dense(shape, narrow(shape))
    memory = None
    for at in (0, 20, 40):
        x, y = text[:, at : at + 20], text[:, at + 1 : at + 21]
        found = lm(x, memory, targets=y)
        memory = found.state
        assert found.nll is not None
        torch.testing.assert_close(found.nll, dense.read(x, y), rtol=1e-5, atol=1e-5)


def test_configuration_comes_from_the_tensors() -> None:
    config, _ = convert(random_state(PLAIN))
    assert config == ModelConfig(
        vocab=29, dim=24, layers=2, heads=3,
        attention=AttentionConfig(kind="adaptive_span", max_span=50, ramp=32.0),
        position=PositionConfig(kind="table"),
        feedforward=FeedForwardConfig(kind="relu", dim=20, bias=True),
        embedding=EmbeddingConfig(bias=True),
        norm="layer", order="post", paper_compat=True,
    )  # fmt: skip
    assert convert(random_state(SHAPES["no spans"]))[0].attention.kind == "full"
    persistent, _ = convert(random_state(SHAPES["persistent"]))
    assert persistent == replace(config, persistent=7, feedforward=FeedForwardConfig(kind="none"))
    tied, _ = convert(random_state(WORDS))
    assert tied.vocab == 43 and tied.embedding == EmbeddingConfig(tied=True, cutoffs=(11, 29), divisor=3)
    assert not convert(random_state(SHAPES["words"]))[0].embedding.tied


def test_settings_that_a_checkpoint_lacks_reach_the_configuration() -> None:
    given = Settings(ramp=16.0, penalty=5e-7, dropout=0.3, embedding_dropout=0.1)
    config, _ = convert(random_state(PLAIN), given)
    assert (config.attention.ramp, config.attention.penalty, config.attention.dropout) == (16.0, 5e-7, 0.3)
    assert (config.feedforward.dropout, config.embedding.dropout) == (0.3, 0.1)
    words, _ = convert(random_state(SHAPES["persistent words"]), given)
    assert (words.feedforward.dropout, words.embedding.dropout) == (0.0, 0.1)  # there is no feed-forward


def nll(lm: spanformer.LM, text: Tensor) -> Tensor:
    found = lm(text[:, :-1], targets=text[:, 1:]).nll
    assert found is not None
    return found


def test_checkpoint_of_ramp_64_needs_the_option(tmp_path: Path, capsys) -> None:
    shape = replace(PLAIN, ramp=64.0, span=100)
    torch.save(checkpoint_of(shape), tmp_path / "a.pt")
    for ramp in ("32", "64"):
        main(["import-original", str(tmp_path / "a.pt"), str(tmp_path / ramp), "--ramp", ramp])
    text = torch.randint(0, shape.vocab, (2, 81), generator=torch.Generator().manual_seed(1))
    theirs = Dense(shape, narrow(shape)).read(text[:, :-1], text[:, 1:])
    torch.testing.assert_close(nll(spanformer.load(tmp_path / "64"), text), theirs, rtol=1e-5, atol=1e-5)
    assert (nll(spanformer.load(tmp_path / "32"), text) - theirs).abs().max() > 0.01


def test_vocabulary_comes_from_train_txt(tmp_path: Path, capsys, monkeypatch) -> None:
    """In order of first appearance; with adaptive embeddings by falling frequency, the later one of equals first."""
    monkeypatch.setenv("SPANFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.txt").write_text("b a b\nc a\n" * 40)
    for cutoffs, words in ((), ["b", "a", "<eos>", "c"]), ((2,), ["<eos>", "a", "b", "c"]):
        shape = replace(PLAIN, vocab=4, cutoffs=cutoffs)
        torch.save(checkpoint_of(shape), tmp_path / "a.pt")
        out = str(tmp_path / f"out{len(cutoffs)}")
        main(["import-original", str(tmp_path / "a.pt"), out, "--text", str(tmp_path / "train.txt")])
        assert load_meta(out)["vocab"] == {"kind": "word", "words": words}
        capsys.readouterr()
        main(["generate", out, "--prompt", "a b", "--max-tokens", "3"])
        assert set(capsys.readouterr().out.split()) <= {"a", "b", "c"}
        main(["score", out, str(tmp_path / "train.txt")])
        assert "bits per" in capsys.readouterr().out
        main(["eval", out, "--data", str(tmp_path / "train.txt"), "--split", "train"])
        assert "perplexity" in capsys.readouterr().out


REFUSED = {
    "ramp is 0.0; expected a positive, finite number of tokens": ["--ramp", "0"],
    "penalty is -1.0; expected a finite number, 0 or more": ["--penalty", "-1"],
    "embedding_dropout is 1.0; expected a share": ["--embedding-dropout", "1"],
    "has 3 different words, <eos> included, and the model has 29; expected the train.txt": ["--text", "train.txt"],
    "none.txt": ["--text", "none.txt"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_wrong_option_is_refused_in_one_sentence(message: str, saved: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(saved.parent)
    (saved.parent / "train.txt").write_text("a b\n")
    with pytest.raises(SystemExit) as end:
        main(["import-original", saved.name, "out", *REFUSED[message]])
    said = capsys.readouterr().err
    assert end.value.code == 2 and message in said and said.count("\n") == 1
    assert not (saved.parent / "out").exists()


def test_folder_records_its_source(saved: Path, tmp_path: Path) -> None:
    said = import_original(saved, tmp_path / "out")
    parameters = sum(t.numel() for key, t in random_state(PLAIN).items() if "mask_template" not in key)
    assert said == (
        "adaptive-span checkpoint enwik8.pt, iteration 599: "
        f"2 layers, dim 24, 3 heads, average span 21 of 50, {parameters:,} parameters"
    )
    meta = read_meta(tmp_path / "out")
    assert meta["source"] == "adaptive-span checkpoint enwik8.pt, iteration 599"
    assert meta["model"]["attention"]["max_span"] == 50 and load_meta(tmp_path / "out") == meta
    with pytest.raises(ValueError, match="already exists"):
        import_original(saved, tmp_path / "out")


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("form", ["zip", "before 1.6", "pickle", "old pickle"])
def test_no_code_in_a_file_is_run(form: str, tmp_path: Path) -> None:
    path, made = tmp_path / "a.pt", tmp_path / "made"
    content = checkpoint_of(PLAIN) | {"logger": Touch(made)}
    if "pickle" in form:
        path.write_bytes(pickle.dumps(content, protocol=2 if form == "old pickle" else None))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(ValueError) as caught:
        read_checkpoint(path)
    assert not made.exists() and str(path) in str(caught.value) and "\n" not in str(caught.value)
    if "pickle" not in form:
        assert "holds Python objects (" in str(caught.value) and "could run code when read" in str(caught.value)


NOT_A_CHECKPOINT = {
    "nothing": b"",
    "text": b"hello, I am a text\n" * 20,
    "zip": b"PK\x05\x06" + bytes(18),
    "plain pickle": pickle.dumps({"model": {"a": 1}}),
}


@pytest.mark.parametrize("name", NOT_A_CHECKPOINT)
def test_file_of_another_kind_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(NOT_A_CHECKPOINT[name])
    with pytest.raises(ValueError, match=r"a\.pt is damaged, or is not a file that torch\.save wrote$"):
        read_checkpoint(path)


def test_missing_file_or_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    for missing in (path, tmp_path):
        with pytest.raises(ValueError, match="is not a file; expected a checkpoint of the adaptive-span code"):
            read_checkpoint(missing)
    for content in ({"weights": {}}, {"model": 3}, [1, 2]):
        torch.save(content, path)
        with pytest.raises(ValueError, match='has no "model" with weights'):
            read_checkpoint(path)


def test_damaged_file_is_refused_in_one_sentence(saved: Path, tmp_path: Path) -> None:
    whole, rng, failed = saved.read_bytes(), random.Random(3), 0
    for number in range(60):
        damaged = bytearray(whole[: rng.randrange(len(whole))] if number % 2 else whole)
        for _ in range(4):
            damaged[rng.randrange(min(len(damaged), 4000))] = rng.randrange(256)
        saved.write_bytes(damaged)
        try:
            convert(read_checkpoint(saved)["model"])
        except ValueError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 30


def without(key: str):
    return lambda state: state.pop(key)


def with_(key: str, tensor: object):
    return lambda state: state.update({key: tensor})


SPAN = "layers.1.attn.attn.adaptive_span._mask.current_val"
WRONG = {
    "it has no key_pe$": (PLAIN, without("key_pe")),
    r"it has no layers\.0\.norm1\.weight$": (PLAIN, without("layers.0.norm1.weight")),
    r"it has no layers\.1\.ff\.fc2\.bias, expected with shape \[24\]": (PLAIN, without("layers.1.ff.fc2.bias")),
    r"it has no in_emb\.weight": (PLAIN, without("in_emb.weight")),
    "it has 'layers.1.extra', which such a model does not have": (PLAIN, with_("layers.1.extra", torch.ones(1))),
    "it has 'layers.00000000001.x', which": (PLAIN, with_("layers.00000000001.x", torch.ones(1))),
    r"its layers have the numbers \[0, 1, 7\]": (PLAIN, with_("layers.7.extra", torch.ones(1))),
    r"its key_pe has shape \[8, 50\], expected 3 dimensions": (PLAIN, with_("key_pe", torch.ones(8, 50))),
    r"its key_pe has shape \[1, 8, 0\]": (PLAIN, with_("key_pe", torch.ones(1, 8, 0))),
    "its head size is 7, which does not divide 24": (PLAIN, with_("key_pe", torch.ones(1, 7, 50))),
    r"current_val has shape \[4, 1, 1\], expected \[3, 1, 1\]": (PLAIN, with_(SPAN, torch.zeros(4, 1, 1))),
    "current_val holds spans that are not within 0 … 1": (PLAIN, with_(SPAN, torch.full((3, 1, 1), 1.5))),
    "current_val holds numbers that are not finite": (PLAIN, with_(SPAN, torch.full((3, 1, 1), torch.nan))),
    r"its key_pe is not a tensor of floating-point": (PLAIN, with_("key_pe", torch.ones(1, 8, 50, dtype=torch.long))),
    "its key_pe is not a tensor": (PLAIN, with_("key_pe", "a text")),
    "it has key_pe twice, with and without 'module.'": (PLAIN, with_("module.key_pe", torch.ones(1, 8, 50))),
    "fewer numbers than its shape": (PLAIN, with_("in_emb.weight", torch.ones(1).expand(10**9, 10**9))),
    "differs from the one without persistent_memory": (
        SHAPES["persistent"],
        with_(SPAN.replace("attn.adaptive", "attn.persistent_memory.adaptive"), torch.full((3, 1, 1), 0.5)),
    ),
    r"it has 'layers\.0\.ff\.fc1\.bias', which": (SHAPES["persistent"], with_("layers.0.ff.fc1.bias", torch.ones(20))),
    r"have the sizes \[26, 9, 2\], expected 26 divided": (
        WORDS,
        with_("in_emb.emb_layers.1.weight", torch.ones(18, 9)),
    ),
    r"it has no in_emb\.emb_layers\.1\.weight": (WORDS, without("in_emb.emb_layers.1.weight")),
    r"it has no out_emb\.out_projs\.2": (WORDS, without("out_emb.out_projs.2")),
    r"it has no in_emb\.emb_projs\.2": (WORDS, without("in_emb.emb_projs.2")),
}


@pytest.mark.parametrize("message", WRONG)
def test_tensors_that_do_not_fit_are_refused_in_one_sentence(message: str) -> None:
    shape, break_ = WRONG[message]
    state = random_state(shape)
    break_(state)
    with pytest.raises(ValueError, match=message) as caught:
        convert(state)
    assert "\n" not in str(caught.value)


def test_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    content = checkpoint_of(PLAIN)
    del content["model"]["module.key_pe"]
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: this is not an adaptive-span model: it has no key_pe"):
        import_original(tmp_path / "a.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
