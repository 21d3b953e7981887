"""Where the text comes from, how it is split, and what cannot be a source."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from spanformer.core.progress import silent
from spanformer.data import DataConfig, corpora, pieces, prepare
from spanformer.data.corpora import NAMED, Named
from spanformer.data.pieces import Piece, limited, texts, whole
from spanformer.data.sources import find

WORDS = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 東京 😀\n"


def read(piece: Piece) -> bytes:
    return b"".join(piece.chunks())


def splits(config: DataConfig) -> dict[str, list[Piece]]:
    return find(config).splits(silent)


def make_tree(root: Path, sizes: dict[str, int]) -> Path:
    for name, size in sizes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * size)
    return root


def names(found: dict[str, list[Piece]]) -> dict[str, list[str]]:
    return {split: [p.path.name for p in held] for split, held in found.items()}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_one_file_is_cut_at_its_end(tmp_path: Path, suffix: str) -> None:
    data = bytes(range(200))
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    found = splits(DataConfig(str(path), valid=0.1, test=0.05))
    assert {split: read(held[0]) for split, held in found.items()} == {
        "train": data[:170],
        "valid": data[170:190],
        "test": data[190:],
    }


def test_files_are_assigned_to_splits_whole(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "here", {f"d{i % 3}/f{i:03}.txt": 100 + i for i in range(200)})
    make_tree(root, {".hidden": 10, ".git/config": 10, "empty.txt": 0})
    found = names(splits(DataConfig(str(root))))
    assert sorted(name for held in found.values() for name in held) == [f"f{i:03}.txt" for i in range(200)]
    assert all(9 <= len(found[split]) <= 11 for split in ("valid", "test"))
    moved = root.rename(tmp_path / "there")
    assert names(splits(DataConfig(str(moved)))) == found, "where the folder is does not matter"
    assert names(splits(DataConfig(f"{moved}/**/*.txt"))) == found, "nor how the files are named"


def test_three_files_of_any_sizes_make_three_splits(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "a", {"huge.txt": 10_000, "b.txt": 700, "c.txt": 800})
    assert names(splits(DataConfig(str(root)))) == {"train": ["huge.txt"], "valid": ["b.txt"], "test": ["c.txt"]}


@pytest.mark.parametrize(
    "files",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("wiki.train.tokens", "val/a", "test/b"),
        ("train/x", "dev.txt", "Test.py"),
    ],
)
def test_splits_that_are_named_are_kept(tmp_path: Path, files: tuple[str, ...]) -> None:
    root = make_tree(tmp_path / "a", {**dict.fromkeys(files, 50), "README.md": 9})
    found = splits(DataConfig(str(root)))
    assert [held[0].path for held in found.values()] == [root / name for name in files]


def test_standard_library_is_the_default() -> None:
    found = splits(DataConfig())
    total = sum(len(p) for held in found.values() for p in held)
    assert total > 5_000_000
    for split in ("valid", "test"):
        assert 0.04 < sum(map(len, found[split])) / total <= 0.05
    paths = [p.path for held in found.values() for p in held]
    assert all(p.suffix == ".py" for p in paths) and len(set(paths)) == len(paths)
    assert not [p for p in paths if {"site-packages", "dist-packages", "__pycache__"} & set(p.parts)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1000])
def test_cut_through_a_character_loses_only_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(pieces, "CHUNK", chunk)
    path = tmp_path / "a.txt"
    path.write_text(WORDS, encoding="utf-8")
    data = WORDS.encode()
    for cut in range(1, len(data)):
        left, right = Piece(path, "", len(data), 0, cut), Piece(path, "", len(data), cut, len(data))
        assert "".join(texts(left, left.chunks())) == data[:cut].decode(errors="ignore")
        assert "".join(texts(right, right.chunks())) == data[cut:].decode(errors="ignore")


def test_limit_spans_files(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {"a": 10, "b": 10, "c": 10})
    held = [whole(root / name) for name in "abc"]
    assert [len(p) for p in limited(held, 15)] == [10, 5]
    assert [len(p) for p in limited(held, 10)] == [10]
    assert [len(p) for p in limited(held, 99)] == [10, 10, 10]


# ---- named corpora, in miniature


def three_files() -> dict[str, bytes]:
    return {f"mini/wiki.{split}.tokens": f" = {split} =\n".encode() for split in ("train", "valid", "test")}


def pack(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Stand-ins for a corpus of three files and for one that is cut."""
    text = bytes(range(100))
    monkeypatch.setitem(NAMED, "wikitext-2", Named("http://127.0.0.1:1/w.zip", NAMED["wikitext-2"].files))
    monkeypatch.setitem(
        NAMED,
        "enwik8",
        Named(
            "http://127.0.0.1:1/enwik8.zip",
            NAMED["enwik8"].files,
            {"train": (0, 90), "valid": (90, 95), "test": (95, 100)},
            text_digest=f"sha256:{hashlib.sha256(text).hexdigest()}",
        ),
    )
    return text


@pytest.mark.parametrize("name", ["w.zip", "w.tar.gz", "w.tgz", "folder"])
def test_copy_of_three_files(mini: bytes, tmp_path: Path, name: str) -> None:
    if name == "folder":
        for split in ("train", "valid", "test"):
            make_tree(tmp_path / name, {f"{split}.txt": 1})
            (tmp_path / name / f"{split}.txt").write_text(f" = {split} =\n")
    else:
        pack(tmp_path / name, three_files())
    found = splits(DataConfig("wikitext-2", copy=str(tmp_path / name)))
    assert {split: read(held[0]) for split, held in found.items()} == {
        split: f" = {split} =\n".encode() for split in ("train", "valid", "test")
    }


@pytest.mark.parametrize("name", ["enwik8", "enwik8.gz", "e.zip", "e.tar.gz"])
def test_copy_that_is_cut(mini: bytes, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("e."):
        pack(path, {"enwik8": mini})
    else:
        path.write_bytes(gzip.compress(mini) if path.suffix else mini)
    found = splits(DataConfig("enwik8", copy=str(path)))
    assert [read(held[0]) for held in found.values()] == [mini[:90], mini[90:95], mini[95:]]


def test_corpus_in_the_downloads_needs_no_network(mini: bytes, own_cache: Path) -> None:
    (own_cache / "downloads").mkdir(parents=True)
    path = pack(own_cache / "downloads" / "enwik8.zip", {"enwik8": mini})
    prepared = prepare(DataConfig("enwik8"))
    path.unlink()
    assert prepare(DataConfig("enwik8")).folder == prepared.folder, "what is prepared needs no download either"
    pack(path, {"enwik8": mini[::-1]})
    with pytest.raises(ValueError, match=r"enwik8.zip is not enwik8: its text has sha256:"):
        prepare(DataConfig("enwik8", limit=50))
    assert not path.exists(), "a wrong download is removed"


def test_offline_error_names_the_url(mini: bytes) -> None:
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1/w.zip could not be downloaded .*--data.from PATH"):
        prepare(DataConfig("wikitext-2"))


def test_urls_and_digests_are_well_formed() -> None:
    for name, corpus in corpora.NAMED.items():
        assert corpus.url.startswith("https://") and corpus.url.endswith(".zip") and name in corpus.url
        for digest in filter(None, (corpus.archive_digest, corpus.text_digest)):
            algorithm, _, value = digest.partition(":")
            assert len(bytes.fromhex(value)) == hashlib.new(algorithm).digest_size


# ---- what is refused

COPIES = {
    "w.zip holds a.txt, b.txt; expected a file named wiki.train.tokens or train.txt": {"a.txt": b"a", "b.txt": b"b"},
    "w.zip holds nothing; expected": {},
    "leaves nothing for the split 'train'": {name: b"" for name in three_files()},
}


@pytest.mark.parametrize("message", COPIES)
def test_archive_without_the_text(mini: bytes, tmp_path: Path, message: str) -> None:
    path = pack(tmp_path / "w.zip", COPIES[message])
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig("wikitext-2", copy=str(path)))


@pytest.mark.parametrize("name", ["w.zip", "w.tar.gz", "enwik8.gz"])
def test_damaged_archive(mini: bytes, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    source = "enwik8" if "enwik8" in name else "wikitext-2"
    path.write_bytes(b"this is none")
    with pytest.raises(ValueError, match=rf"{name} is damaged or no such archive"):
        prepare(DataConfig(source, copy=str(path)))
    if source == "enwik8":
        path.write_bytes(gzip.compress(mini)[:-20])
        with pytest.raises(ValueError, match=r"enwik8.gz is damaged"):
            prepare(DataConfig(source, copy=str(path)))


def test_copy_that_is_something_else(mini: bytes, tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(mini[:99])
    with pytest.raises(ValueError, match=r"enwik8 is not enwik8: its text has sha256:.*expected sha256:"):
        prepare(DataConfig("enwik8", copy=str(tmp_path / "enwik8")))
    with pytest.raises(ValueError, match=r"holds enwik8; expected a file named wiki.train.tokens or train.txt"):
        prepare(DataConfig("wikitext-2", copy=str(tmp_path / "enwik8")))
    with pytest.raises(ValueError, match="which does not exist; expected a copy of enwik8"):
        prepare(DataConfig("enwik8", copy=str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="'stdlib' is not a named corpus; expected one of enwik8, text8"):
        prepare(DataConfig("stdlib", copy=str(tmp_path)))


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "void").mkdir()
    make_tree(tmp_path / "two", {"a": 50, "b": 50})
    pack(tmp_path / "w.zip", three_files())
    make_tree(tmp_path / "mixed", {"a.txt": 50, "b.txt": 50, "c.txt": 50})
    pack(tmp_path / "mixed" / "w.tar.gz", three_files())
    make_tree(tmp_path, {"tiny.txt": 3})
    wrong = {
        "enwiki8": "source 'enwiki8' does not exist; did you mean 'enwik8'?",
        "WikiText-103": "did you mean 'wikitext-103'?",
        str(tmp_path / "gone"): "does not exist; expected a path, or one of stdlib, numbers, facts, digits, recall",
        str(tmp_path / "*.csv"): r"\*.csv' matches no file",
        str(tmp_path / "empty.txt"): "empty.txt' is empty; expected some text",
        str(tmp_path / "void"): "void' is empty; expected some text",
        str(tmp_path / "two"): "leaves nothing for the split 'train'; expected more text, a larger share, or three",
        str(tmp_path / "tiny.txt"): "leaves nothing for the split 'valid'; expected more text",
        str(tmp_path / "w.zip"): "w.zip is an archive; unpack it and give the folder",
        str(tmp_path / "mixed"): "w.tar.gz is an archive; unpack it and give the folder",
        str(tmp_path / "mixed" / "*.*"): "w.tar.gz is an archive; unpack it and give the folder",
    }
    for source, message in wrong.items():
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            prepare(DataConfig(source))


# ---- what would never end, or is not there


def test_pipe_or_device_is_not_a_corpus(mini: bytes, tmp_path: Path) -> None:
    pipe = tmp_path / "enwik8"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"^from '{path}' is not a regular file; copy its content to one$"):
            find(DataConfig("enwik8", copy=str(path)))
        with pytest.raises(ValueError, match=f"^source '{path}' is not a regular file; copy its content to one$"):
            find(DataConfig(str(path)))
    with pytest.raises(ValueError, match=f"'{pipe}' is not a regular file"):  # inside the folder that is the copy
        splits(DataConfig("enwik8", copy=str(tmp_path)))


@pytest.mark.parametrize("option", ["source", "copy", "tokenizer", "cache"])
def test_home_folder_of_unknown_user_is_refused(option: str) -> None:
    given = {"source": "enwik8" if option == "copy" else "numbers", "tokens": "bpe", option: "~nobody-of-this-name/x"}
    name = {"copy": "from"}.get(option, option)
    with pytest.raises(ValueError, match=f"^{name} is '~nobody-of-this-name/x', and no user of that name has a home"):
        prepare(DataConfig(**given))
