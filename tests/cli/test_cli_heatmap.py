"""`spanformer heatmap`: pictures and a terminal's picture of where heads look."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from spanformer import LM, Encoder, ModelConfig, Seq2Seq, load
from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.data import Bytes, Words
from spanformer.infer import answer
from spanformer.model.config import SPECIAL, AttentionConfig, EncoderConfig, PositionConfig
from spanformer.model.folder import write_folder

MODEL = ModelConfig(dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=32, ramp=4.0, init=0.3))


ETC = {"attention": AttentionConfig(kind="etc(4, 2)"), "position": PositionConfig(kind="none")}


def save(path, vocab, made=LM, kind="lm", **changes):
    torch.manual_seed(0)
    config = dataclasses.replace(MODEL, vocab=vocab.size + SPECIAL[kind], kind=kind, **changes)
    write_folder(path, {"model": made(config).state_dict()}, {"model": as_dict(config), "vocab": vocab.to_json()})
    return str(path)


def test_pictures_and_a_terminal_picture(tmp_path, capsys):
    main(["heatmap", save(tmp_path / "m", Bytes()), "--text", "a né", "--layer", "2", "--head", "1"])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].startswith("layer 2, head 1:") and [line[0] for line in lines[3:8]] == ["a", "␣", "n", "�", "�"]
    for name in ("heatmap.png", "heatmap-layer2-head1.png"):
        assert (tmp_path / "m" / "heatmap" / name).stat().st_size > 1000 and name in shown


def test_encoder_attends_to_the_future(tmp_path, capsys):
    main(["heatmap", save(tmp_path / "e", Bytes(), Encoder, "encoder"), "--text", "a cat"])
    shown = capsys.readouterr().out
    assert "tokens away on average" in shown and (tmp_path / "e" / "heatmap" / "heatmap.png").stat().st_size > 1000


def test_global_tokens_come_first(tmp_path, capsys):
    main(["heatmap", save(tmp_path / "e", Bytes(), Encoder, "encoder", **ETC), "--text", "a cat"])
    rows = capsys.readouterr().out.splitlines()[3:11]
    assert [row.split()[0] for row in rows] == ["Σ1", "Σ2", "Σ3", "a", "␣", "c", "a", "t"]
    folder = save(tmp_path / "s", Bytes(), Seq2Seq, "seq2seq", encoder=EncoderConfig(**ETC))
    main(["heatmap", folder, "--text", "a cat", "--target", "yes"])
    assert (tmp_path / "s" / "heatmap" / "heatmap-encoder.png").stat().st_size > 1000


@pytest.mark.parametrize("target", ["yes", ""])
def test_encoder_decoder_shows_cross_attention(tmp_path, capsys, monkeypatch, target):
    """The target that is given, or the answer; this one, of random weights, is cut before it ends."""
    monkeypatch.setattr("spanformer.cli.heatmap.LONGEST", 5)
    folder = save(tmp_path / "s", Bytes(), Seq2Seq, "seq2seq")
    main(["heatmap", folder, "--text", "a cat", "--target", target, "--layer", "2", "--head", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "layer 2, head 1: a row is a token as it is written, a column one of the source"
    assert lines[2].split() == [*"a␣cat<"]
    rows = [line.split()[0] for line in lines[3 : lines.index("", 3)]]
    (written,) = answer(load(folder, Seq2Seq), ["a cat"], vocab=Bytes(), max_tokens=5)
    assert rows == ["y", "e", "s", "<end>"] if target else len(rows) == len(written) == 5 and "<end>" not in rows
    names = sorted(path.name for path in (tmp_path / "s" / "heatmap").iterdir())
    assert [name for name in names if "layer" not in name] == [
        "heatmap-cross-attention.png", "heatmap-decoder.png", "heatmap-encoder.png",
    ]  # fmt: skip
    assert len(names) == 6 and "heatmap-cross-attention-layer2-head1.png" in names
    assert sum(line.startswith("picture: ") for line in lines) == 6


def test_words_name_their_rows(tmp_path, capsys):
    vocab = Words.learn([["the cat sat\n"]])
    main(["heatmap", save(tmp_path / "w", vocab), "--text", "the cat", "--out", str(tmp_path / "here")])
    shown = capsys.readouterr().out
    assert "\nthe  " in shown and "\ncat  " in shown and (tmp_path / "here" / "heatmap.png").exists()


@pytest.mark.parametrize(
    "more, said",
    [
        (("--text", ""), "text is empty; expected a text for the model to process"),
        (("--text", "a", "--layer", "3"), "layer is 3; the model has 2, counted from 1"),
        (("--text", "a", "--head", "-1"), "head is -1; expected a number from 1 on, or 0"),
        (("--text", "a", "--target", "b"), "--target is for encoder–decoders; "),
        ((), "--text is missing"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, more, said):
    folder = save(tmp_path / "m", Bytes())
    with pytest.raises(SystemExit) as end:
        main(["heatmap", folder, *more])
    assert end.value.code == 2 and said in capsys.readouterr().err
