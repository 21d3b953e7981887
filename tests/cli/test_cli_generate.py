"""`spanformer generate` and `spanformer score`: what they print and where, and the sentence for everything wrong."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from spanformer import LM, ModelConfig, Sampling, generate
from spanformer.cli.main import main
from spanformer.core.fields import as_dict
from spanformer.data import BPE, Bytes, Chars, Words
from spanformer.model.config import AttentionConfig
from spanformer.model.folder import META, write_folder
from spanformer.model.load import load
from spanformer.train.evaluate import evaluate

TEXT = "the cat sat on the mat, naïve as it was\nand the dog sat on the cat\n" * 3
VOCABS = {
    "byte": Bytes(), "char": Chars.learn([[TEXT]]), "word": Words.learn([[TEXT]]), "bpe": BPE.learn([[TEXT]], 270)
}  # fmt: skip
MODEL = ModelConfig(dim=16, layers=2, heads=2, attention=AttentionConfig(max_span=32, ramp=4.0, init=0.3))


def save(path, vocab, seed=0):
    torch.manual_seed(seed)
    config = dataclasses.replace(MODEL, vocab=vocab.size)
    write_folder(path, {"model": LM(config).state_dict()}, {"model": as_dict(config), "vocab": vocab.to_json()})
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {kind: save(folder / kind, vocab) for kind, vocab in VOCABS.items()}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(capsys):
    """Runs the command line; its text, and what it says besides."""

    def run(*arguments):
        main([str(argument) for argument in arguments])
        return tuple(capsys.readouterr())

    return run


@pytest.fixture
def refused(capsys):
    def refused(*arguments):
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert end.value.code == 2 and not out and err.startswith("spanformer: ") and err.count("\n") == 1, err
        return err.removeprefix("spanformer: ").rstrip("\n")

    return refused


def stdin(monkeypatch, data: bytes):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def expected(model, kind, prompt, **settings):
    pieces = generate(load(model), prompt, vocab=VOCABS[kind], seed=1, **settings)
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("kind", VOCABS)
def test_text_goes_to_standard_output_and_figures_do_not(run, models, kind):
    out, err = run("generate", models[kind], "--prompt", "the cat", "--max-tokens", 20, "--seed", 1)
    text = expected(models[kind], kind, "the cat", max_tokens=20, sampling=Sampling(0.8))
    assert out == text + "\n" * (not text.endswith("\n")) and len(text) > 5
    assert "generated: 20 tokens in" in err and "tokens/s" in err
    known = len(np.concatenate(list(VOCABS[kind].prompt(["the cat"]))))
    full = 2 * MODEL.layers * MODEL.dim * 4 * (known + 20)  # keys and values in float32
    took = load(models[kind]).cache(1).bytes()
    assert f"cache: {took / 1e3:.1f} kB; full attention would need {full / 1e3:.1f} kB" in err
    assert f"for these {known + 20} tokens\n" in err and "only these were read" not in err


@pytest.mark.parametrize("kind", VOCABS)
def test_file_standard_input_and_a_prompt_are_one_text(run, models, kind, tmp_path, monkeypatch):
    (tmp_path / "log.txt").write_text(TEXT[:-1], encoding="utf-8")
    options = ("--max-tokens", 9, "--temperature", 0)
    text = expected(models[kind], kind, TEXT[:-1], max_tokens=9, sampling=Sampling(0))
    out, err = run("generate", models[kind], "--file", tmp_path / "log.txt", *options)
    assert out.rstrip("\n") == text.rstrip("\n") and "so the others were skipped" in err
    stdin(monkeypatch, TEXT[:-1].encode())
    assert run("generate", models[kind], "--file", "-", *options)[0] == out
    (tmp_path / "start.txt").write_text(TEXT[:20], encoding="utf-8")
    both = run("generate", models[kind], "--file", tmp_path / "start.txt", "--prompt", TEXT[20:-1], *options)
    assert both[0] == out


def test_every_sampling_option(run, models):
    model = models["byte"]
    common = ("generate", model, "--prompt", "the ", "--max-tokens", 30, "--seed", 1)
    sampling = Sampling(0.9, top_k=50, top_p=0.9, min_p=0.01, repetition=1.2, repetition_window=20)
    options = ("--temperature", 0.9, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--repetition", 1.2)
    out, _ = run(*common, *options, "--repetition-window", 20)
    assert out == expected(model, "byte", "the ", max_tokens=30, sampling=sampling) + "\n"
    assert run(*common, *options, "--repetition-window", 20, "--lookup", 4)[0] == out
    searched, _ = run(*common, "--beams", 3)
    assert searched == expected(model, "byte", "the ", max_tokens=30, beams=3) + "\n"
    stop = searched[3:5]
    assert run(*common, "--beams", 3, "--stop", stop)[0] == searched[: searched.index(stop)] + "\n"


def test_several_prompts_are_printed_one_after_the_other(run, models):
    out, err = run("generate", models["char"], "--prompt", "the", "dog sat on", "--max-tokens", 12, "--seed", 1)
    first = expected(models["char"], "char", "the", max_tokens=12, sampling=Sampling(0.8))
    assert out.startswith(f"--- 1 of 2: 'the'\n{first}\n--- 2 of 2: 'dog sat on'\n") and "generated: 24 tokens" in err
    assert "prompt: 13 tokens in" in err and "only these were read" not in err


def test_saved_cache_is_continued(run, models, tmp_path, refused):
    options = ("--max-tokens", 9, "--temperature", 0)
    whole, _ = run("generate", models["byte"], "--prompt", TEXT[:50], *options)
    cache = tmp_path / "read.cache"
    run("generate", models["byte"], "--prompt", TEXT[:40], "--save-cache", cache, *options)
    out, err = run("generate", models["byte"], "--load-cache", cache, "--prompt", TEXT[40:50], *options)
    assert out == whole and "prompt: 10 tokens" in err
    other = save(tmp_path / "other", Bytes(), seed=1)
    said = refused("generate", other, "--load-cache", cache, "--prompt", "a")
    assert "was saved by another model" in said
    said = refused("generate", models["byte"], "--load-cache", cache, "--prompt", "a", "b")
    assert said == "the KV cache has 1 rows; expected one for each prompt, 2"


@pytest.mark.parametrize("bits", [8, 4])
def test_cache_of_few_bits(run, models, bits):
    out, err = run("generate", models["byte"], "--prompt", "the ", "--cache-bits", bits, "--max-tokens", 9)
    assert out and "generated: 9 tokens" in err


BAD = [
    (("--prompt", "the Q"), "the vocabulary lacks the character 'Q' (U+0051), at position 5 of the prompt; "
     "expected characters of the training text"),
    (("--prompt", ""), "the prompt is empty; expected at least one token"),
    ((), "no prompt is given; expected --prompt TEXT or --file PATH (- is standard input)"),
    (("--prompt", "a", "--temperature", "-1"), "temperature is -1.0; expected 0 or more"),
    (("--prompt", "a", "--top-p", "0"), "top_p is 0.0; expected a probability above 0, up to 1"),
    (("--prompt", "a", "--top-k", "-3"), "top_k is -3; expected a number of tokens, or 0 for all"),
    (("--prompt", "a", "--stop", ""),
     "stop contains an empty string, which would stop at once; expected non-empty strings"),
    (("--prompt", "a", "--beams", "2", "--temperature", "0.5"),
     "beams is 2, and beam search does not sample; omit sampling, or use 1 beam"),
    (("--prompt", "a", "--beams", "2", "--lookup", "2"), "beams is 2 and lookup is 2; expected one of the two"),
    (("--prompt", "a", "t", "--lookup", "2"), "lookup takes one prompt at a time; got 2"),
    (("--prompt", "a", "t", "--file", "-"), "--file is given with 2 prompts; expected at most one, appended to it"),
    (("--prompt", "a", "--max-tokens", "0"), "max_tokens is 0; expected 1 or more"),
    (("--file", "no/such.txt"), "no/such.txt cannot be read: No such file or directory"),
    (("--file", "."), ". is a folder; expected a file, or - for standard input"),
    (("--prompt", "a", "--load-cache", "no.cache"), "no.cache cannot be read as a saved KV cache"),
]  # fmt: skip


@pytest.mark.parametrize("options, said", BAD, ids=[" ".join(options) or "nothing" for options, _ in BAD])
def test_bad_input_is_one_sentence(refused, models, options, said):
    assert refused("generate", models["char"], *options).startswith(said)


@pytest.mark.parametrize("command", [("generate", "{}", "--file"), ("score", "{}")])
def test_binary_files_are_refused_by_text_vocabularies(refused, run, models, tmp_path, command):
    path = tmp_path / "a.bin"
    for data, said in [
        (b"the \xff", f"{path} is not UTF-8: byte 0xff at offset 4; convert it, or use byte tokens"),
        (b"the \xc3", f"{path} is not UTF-8: byte 0xc3 at offset 4; convert it, or use byte tokens"),
        (b"the \0", f"{path} is binary, with a NUL byte at offset 4; use byte tokens"),
    ]:
        path.write_bytes(data)
        for kind in ("char", "word", "bpe"):
            assert refused(*(word.format(models[kind]) for word in command), path) == said
        assert run(*(word.format(models["byte"]) for word in command), path)
    path.write_bytes(b"")
    said = "the prompt is empty; expected at least one token"
    said = said if command[0] == "generate" else f"{path} is empty; expected some text"
    assert refused(*(word.format(models["byte"]) for word in command), path) == said


@pytest.mark.parametrize("command", ["generate", "score"])
def test_checkpoint_of_another_version_or_of_unknown_tokens_is_refused(refused, models, tmp_path, command):
    rest = ("--prompt", "a") if command == "generate" else (META,)
    newer = tmp_path / "newer"
    newer.mkdir()
    meta = json.loads((tmp_path.__class__(models["byte"]) / META).read_text())
    (newer / META).write_text(json.dumps(meta | {"format": 99}))
    file = ("--prompt", "a") if command == "generate" else (newer / META,)
    assert refused(command, newer, *file) == (
        f"{newer} was written by a newer spanformer (format 99; this one reads up to 1); upgrade spanformer"
    )
    bare = tmp_path / "bare"
    config = dataclasses.replace(MODEL, vocab=9)
    write_folder(bare, {"model": LM(config).state_dict()}, {"model": as_dict(config)})
    assert refused(command, bare, *(file if rest else ())) == (
        f"{bare} has no vocabulary; expected one to encode text (in Python, spanformer.generate takes ids)"
    )
    assert refused(command, tmp_path / "none", *file).endswith("expected the folder of a model, a checkpoint or a run")


def test_closed_standard_input_is_refused(refused, models, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    said = "standard input is closed; pipe a text into it, or give a file"
    assert refused("generate", models["byte"], "--file", "-") == said
    assert refused("score", models["byte"], "-") == said


@pytest.mark.slow
def test_closed_output_pipe_is_no_error(models):
    command = f"'{sys.executable}' -m spanformer generate '{models['byte']}' --prompt a --max-tokens 2000 | head -c 5"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, env=os.environ)
    assert done.returncode == 141 and len(done.stdout) == 5 and b"Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("kind", VOCABS)
def test_score_is_that_of_evaluating_the_same_tokens(run, models, kind, tmp_path, monkeypatch):
    vocab, path, rows = VOCABS[kind], tmp_path / "text.txt", tmp_path / "rows.jsonl"
    path.write_text(TEXT, encoding="utf-8")
    ids = vocab.encode(TEXT)
    truth = evaluate(load(models[kind]), ids, units=len(TEXT), block=32)
    out, _ = run("score", models[kind], path, "--chunk", 32, "--jsonl", rows)
    per_byte = truth.nats / math.log(2) / len(TEXT.encode())
    assert out.startswith(f"{truth.bits:.4f} bits per character, {per_byte:.4f} per byte\n")
    assert f"{len(ids):,} tokens ({len(TEXT):,} characters, {len(TEXT.encode()):,} bytes)" in out
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == ids.tolist() and [line["at"] for line in lines] == list(range(len(ids)))
    assert math.isclose(sum(line["bits"] for line in lines), truth.nats / math.log(2), rel_tol=1e-5)
    assert lines[0]["bits"] == round(math.log2(vocab.size), 6) and lines[1]["text"] == vocab.decode(ids[1:2])
    stdin(monkeypatch, TEXT.encode())
    piped, figures = run("score", models[kind], "-", "--jsonl", "-", "--chunk", 7)
    assert [json.loads(line)["id"] for line in piped.splitlines()] == ids.tolist()
    assert "bits per character" in figures


def test_unknown_characters_are_scored_as_the_unknown_one(run, models, tmp_path):
    (tmp_path / "text.txt").write_text("the QQ", encoding="utf-8")
    out, _ = run("score", models["char"], tmp_path / "text.txt")
    truth = evaluate(load(models["char"]), VOCABS["char"].encode("the QQ").astype(np.int64))
    assert out.startswith(f"{truth.bits:.4f} bits per character") and "2 of the tokens are not in the model" in out


@pytest.mark.parametrize("command", ["generate", "score"])
def test_help_explains(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert not end.value.code and "For example:" in out and "standard input" in out


def test_help_waits_for_no_torch():
    probe = (
        "import sys\nfrom spanformer.cli.main import main\ntry:\n    main(['generate', '--help'])\nfinally:\n"
        "    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stderr.strip() == "False", done.stderr
