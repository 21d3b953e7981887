"""Tokens on disk: right, made once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from spanformer.data import BPE, Chars, DataConfig, Words, from_json, load, pieces, prepare

TEXT = "".join(f"line {i} of naïve text, 東京 #{i % 7}\n" for i in range(300))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "my text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Own splits, so that an oracle need not know about cuts."""
    (tmp_path / "corpus").mkdir()
    third = len(TEXT) // 3
    for i, split in enumerate(("train", "valid", "test")):
        text = TEXT[i * third : (i + 1) * third] + ("~" if split == "test" else "")
        (tmp_path / "corpus" / f"{split}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "corpus"


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("tokens", ["byte", "char", "word", "bpe"])
def test_ids_are_those_of_the_whole_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tokens: str, chunk: int
) -> None:
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    prepared = prepare(DataConfig(str(folder), tokens))  # type: ignore[arg-type]
    assert prepared.vocab.kind == tokens and list(prepared.splits) == ["train", "valid", "test"]
    assert prepared.unit == {"bpe": "byte"}.get(tokens, tokens)
    for split, held in prepared.splits.items():
        text = (folder / f"{split}.txt").read_text(encoding="utf-8")
        assert isinstance(held.ids, np.memmap) and not held.ids.flags.writeable
        assert held.ids.dtype == prepared.vocab.dtype
        assert np.array_equal(held.ids, prepared.vocab.encode(text))
        assert held.tokens == len(held.ids)
        words = sum(len(line.split()) + 1 for line in text.splitlines())
        size = len(text.encode())
        assert held.units == {"byte": size, "bpe": size, "char": len(text), "word": words}[tokens]
    if tokens == "char":
        assert prepared.splits["test"].ids[-1] == prepared.vocab.size - 1, "~ is not in the training text"


def test_vocabulary_is_learned_from_the_training_text_alone(folder: Path) -> None:
    train = (folder / "train.txt").read_text(encoding="utf-8")
    for config, expected in (
        (DataConfig(str(folder), "char"), Chars.learn([[train]])),
        (DataConfig(str(folder), "word", vocab=20), Words.learn([[train]], 20)),
        (DataConfig(str(folder), "bpe", vocab=300), BPE.learn([[train]], 300)),
    ):
        assert prepare(config).vocab.to_json() == expected.to_json()


def test_text_is_prepared_once(source: Path, own_cache: Path) -> None:
    told: list[tuple[str, float, float]] = []
    first = prepare(DataConfig(str(source), "char"), lambda *what: told.append(what))
    assert [what for what, *_ in told] == [
        "learning the vocabulary",
        "encoding train",
        "encoding valid",
        "encoding test",
    ]
    assert all(done == total > 0 for _, done, total in told)
    told.clear()
    again = prepare(DataConfig(str(source), "char"), lambda *what: told.append(what))
    assert again.folder == first.folder and not told
    assert first.folder.is_relative_to(own_cache) and " " not in first.folder.name
    assert sorted(p.name for p in (own_cache / "tokens").iterdir()) == [first.folder.name], "nothing else is left"
    meta = json.loads((first.folder / "meta.json").read_text())
    valid = first.splits["valid"]
    digest = hashlib.sha256((first.folder / "valid.bin").read_bytes()).hexdigest()
    assert meta["splits"]["valid"] == {"tokens": valid.tokens, "units": valid.units, "sha256": digest}
    assert valid.sha256 == digest
    assert from_json(json.loads((first.folder / "vocab.json").read_text())).to_json() == first.vocab.to_json()


def test_folder_name_depends_on_every_setting(source: Path) -> None:
    def where(**options) -> Path:
        return prepare(DataConfig(str(source), **options)).folder

    base = where()
    changed = [where(tokens="char"), where(tokens="word", vocab=9), where(valid=0.1), where(test=0.1), where(limit=999)]
    os.utime(source, (1, 1))
    changed.append(where())
    source.write_text(TEXT + "more", encoding="utf-8")
    os.utime(source, (1, 1))
    changed.append(where())
    assert len({base, *changed}) == len(changed) + 1


def test_limit_is_of_bytes(source: Path) -> None:
    prepared = prepare(DataConfig(str(source), limit=1000))
    assert {split: held.units for split, held in prepared.splits.items()} == {"train": 1000, "valid": 100, "test": 100}
    assert prepared.splits["train"].ids.tobytes() == TEXT.encode()[:1000]
    with pytest.raises(ValueError, match="leaves no tokens for the split 'valid'; expected more text"):
        prepare(DataConfig(str(source), limit=5))


@pytest.mark.parametrize("harm", ["short", "empty", "gone", "no json", "wrong json", "no vocabulary"])
def test_damaged_folder_is_named_and_made_again(source: Path, harm: str) -> None:
    prepared = prepare(DataConfig(str(source), "word"))
    want = np.array(prepared.splits["valid"].ids)
    bin, meta = prepared.folder / "valid.bin", prepared.folder / "meta.json"
    match harm:
        case "short":
            bin.write_bytes(bin.read_bytes()[:-1])
        case "empty":
            bin.write_bytes(b"")
        case "gone":
            bin.unlink()
        case "no json":
            meta.write_text("{")
        case "wrong json":
            meta.write_text('{"splits": {"train": {"tokens": "many"}}}')
        case "no vocabulary":
            (prepared.folder / "vocab.json").write_text("[]")
    with pytest.raises(ValueError, match=r"the prepared folder .* is damaged"):
        load(prepared.folder)
    with pytest.warns(UserWarning, match=rf"{prepared.folder} is damaged \(.*\); preparing it again"):
        again = prepare(DataConfig(str(source), "word"))
    assert again.folder == prepared.folder and np.array_equal(again.splits["valid"].ids, want)
    assert len(list(prepared.folder.parent.iterdir())) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(DataConfig(str(source), "word"))


def test_second_of_two_processes_uses_the_first_result(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(str(source))
    winner: list[Path] = []

    def meanwhile(_what: str, _done: float, _total: float) -> None:
        if not winner:
            winner.append(source)  # before it recurses
            winner[0] = prepare(config).folder

    loser = prepare(config, meanwhile)
    assert loser.folder == winner[0] and len(list(loser.folder.parent.iterdir())) == 1
    assert loser.splits["train"].ids.tobytes() == TEXT.encode()[: loser.splits["train"].tokens]


def test_processes_at_the_same_time(source: Path) -> None:
    code = f"from spanformer.data import *; print(prepare(DataConfig({str(source)!r}, 'char')).folder)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0] and len(folders) == 1
    assert len(list(Path(folders.pop()).parent.iterdir())) == 1


def test_failed_preparation_leaves_no_files(source: Path, own_cache: Path) -> None:
    def stop(_what: str, _done: float, _total: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(DataConfig(str(source)), stop)
    assert not list((own_cache / "tokens").iterdir())


def test_what_a_killed_process_left_is_removed(source: Path, own_cache: Path) -> None:
    if not (child := os.fork()):
        os.fsync = lambda _descriptor: os.kill(os.getpid(), signal.SIGKILL)
        prepare(DataConfig(str(source), "char"))
    os.waitpid(child, 0)
    tokens = own_cache / "tokens"
    (left,) = tokens.iterdir()
    assert left.name.startswith(".")
    found = prepare(DataConfig(str(source)))  # of another vocabulary: the rest may be large, and goes at once
    assert list(tokens.iterdir()) == [found.folder]


@pytest.mark.parametrize("tokens", ["char", "word", "bpe"])
def test_binary_file_is_refused_as_text(tmp_path: Path, tokens: str) -> None:
    data = TEXT.encode()
    wrong = {
        "is binary, with a NUL byte at offset 100; use byte tokens": data[:100] + b"\0" + data[100:],
        "is not UTF-8: byte 0xff at offset 100; convert it, or use byte tokens": data[:100] + b"\xff" + data[100:],
        f"is not UTF-8: byte 0xe6 at offset {len(data)}; convert": data + "東".encode()[:2],
    }
    for message, content in wrong.items():
        path = tmp_path / "a.txt"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} {message}"):
            prepare(DataConfig(str(path), tokens))  # type: ignore[arg-type]
        assert prepare(DataConfig(str(path))).splits["train"].tokens > 0


def test_tokenizer_from_a_file(source: Path, tmp_path: Path) -> None:
    trained = BPE.learn([[TEXT]], 270)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(trained.to_json()["tokenizer"]))
    prepared = prepare(DataConfig(str(source), "bpe", tokenizer=str(path)))
    assert prepared.vocab.to_json() == trained.to_json()
    assert TEXT.startswith(prepared.vocab.decode(prepared.splits["train"].ids).rstrip("\ufffd"))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used: the package tokenizers cannot load"):
        prepare(DataConfig(str(source), "bpe", tokenizer=str(path)))
    path.write_text("nonsense")
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used: Expecting value"):
        prepare(DataConfig(str(source), "bpe", tokenizer=str(path)))
    with pytest.raises(ValueError, match=r"tokenizer 'nowhere.json' does not exist"):
        prepare(DataConfig(str(source), "bpe", tokenizer="nowhere.json"))


def test_prepared_data_survives_a_missing_package(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(DataConfig(str(source), "bpe"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"^tokens 'bpe' needs the package tokenizers"):
        prepare(DataConfig(str(source), "bpe"))
    assert prepared.folder.exists()


def test_cache_that_cannot_be_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"the cache .*file/x cannot be written \(Not a directory\); choose another with"
    ):
        prepare(DataConfig(str(source), cache=str(tmp_path / "file" / "x")))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_cache_without_permission(source: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"the cache .*locked cannot be written \(Permission denied\)"):
        prepare(DataConfig(str(source), cache=str(tmp_path / "locked")))


def test_cache_folder_follows_option_and_environment(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DataConfig().cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SPANFORMER_CACHE")
    assert DataConfig().cache_folder() == Path.home() / ".cache" / "spanformer"
    assert prepare(DataConfig(str(source), cache=str(tmp_path / "mine"))).folder.is_relative_to(tmp_path / "mine")


# ---- real data


def test_wikitext_2_is_as_published(shared) -> None:
    prepared = prepare(DataConfig("wikitext-2", "word", copy=str(shared("wikitext-2.tar.gz"))))
    assert prepared.vocab.size == 33_278 and isinstance(prepared.vocab, Words)
    assert prepared.vocab.words[0] == "the" and "<unk>" in prepared.vocab.words[:5]
    counts = {split: (held.tokens, held.units) for split, held in prepared.splits.items()}
    assert counts == {
        "train": (2_088_628, 2_088_628),
        "valid": (217_646, 217_646),
        "test": (245_569, 245_569),
    }


def test_shakespeare_by_characters(shared) -> None:
    prepared = prepare(DataConfig(str(shared("tinyshakespeare.txt.gz")), "char"))
    assert sum(held.tokens for held in prepared.splits.values()) == 1_115_394
    assert prepared.vocab.size == 65 + 1
    assert prepared.vocab.decode(prepared.splits["train"].ids[:14]) == "First Citizen:"


@pytest.mark.slow
def test_enwik8_has_its_splits(shared) -> None:
    prepared = prepare(DataConfig("enwik8", copy=str(shared("enwik8.gz"))))
    assert [held.units for held in prepared.splits.values()] == [90_000_000, 5_000_000, 5_000_000]
    assert prepared.splits["train"].ids[:10].tobytes() == b"<mediawiki"
