"""`spanformer heatmap`: pictures and a terminal's picture of where heads look."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spanformer import LM, Encoder, ModelConfig, Seq2Seq
from spanformer.cli.main import main
from spanformer.data import Bytes, Words
from spanformer.model.config import SPECIAL, AttentionConfig
from spanformer.model.fields import as_dict
from spanformer.model.folder import write_folder

MODEL = ModelConfig(dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=32, ramp=4.0, init=0.3))


def save(path, vocab, made=LM, kind="lm"):
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, vocab=vocab.size + SPECIAL[kind], kind=kind)
    write_folder(path, {"model": made(config).state_dict()}, {"model": as_dict(config), "vocab": vocab.to_json()})
    return str(path)


def test_pictures_and_a_terminal_picture(tmp_path, capsys):
    main(["heatmap", save(tmp_path / "m", Bytes()), "--text", "a né", "--layer", "2", "--head", "1"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("layer 2, head 1:") and [line[0] for line in lines[3:8]] == ["a", "␣", "n", "�", "�"]
    for name in ("heatmap.png", "heatmap-layer2-head1.png"):
        assert (tmp_path / "m" / "heatmap" / name).stat().st_size > 1000 and name in shown


def test_an_encoder_looks_ahead_and_two_texts_are_refused(tmp_path, capsys):
    main(["heatmap", save(tmp_path / "e", Bytes(), Encoder, "encoder"), "--text", "a cat"])
    shown = capsys.readouterr().out
    assert "tokens away on average" in shown and (tmp_path / "e" / "heatmap" / "heatmap.png").stat().st_size > 1000
    with pytest.raises(SystemExit):
        main(["heatmap", save(tmp_path / "s", Bytes(), Seq2Seq, "seq2seq"), "--text", "a"])
    assert "is an encoder–decoder, which reads two texts" in capsys.readouterr().err


def test_words_name_their_rows(tmp_path, capsys):
    vocab = Words.learn([["the cat sat\n"]])
    main(["heatmap", save(tmp_path / "w", vocab), "--text", "the cat", "--out", str(tmp_path / "here")])
    shown = capsys.readouterr().out
    assert "\nthe  " in shown and "\ncat  " in shown and (tmp_path / "here" / "heatmap.png").exists()


@pytest.mark.parametrize(
    "more, said",
    [
        (("--text", ""), "text is empty; expected a sentence for the model to read"),
        (("--text", "a", "--layer", "3"), "layer is 3; the model has 2, counted from 1"),
        (("--text", "a", "--head", "-1"), "head is -1; expected a number from 1 on, or 0"),
        ((), "--text is missing"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, more, said):
    folder = save(tmp_path / "m", Bytes())
    with pytest.raises(SystemExit) as end:
        main(["heatmap", folder, *more])
    assert end.value.code == 2 and said in capsys.readouterr().err
