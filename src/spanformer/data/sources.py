"""Finds the splits of a source: a named corpus, the standard library, or files of your own."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spanformer.core.paths import check_regular, expand_home
from spanformer.core.progress import OnProgress
from spanformer.data import images, numbers, tasks
from spanformer.data.config import DataConfig
from spanformer.data.corpora import NAMED, SPLITS, pieces_of
from spanformer.data.pieces import Piece, is_archive, reading, whole
from spanformer.data.vocab import Vocab

SOURCES = ("stdlib", "numbers", "facts", images.DIGITS, *tasks.TASKS, *NAMED)
OWN_SPLITS = {"train": {"train"}, "valid": {"valid", "validation", "val", "dev"}, "test": {"test"}}
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    name: str
    """short, for file names"""
    identity: Any
    """plain JSON that changes whenever the text may have changed; made without reading or downloading"""
    splits: Callable[[OnProgress], dict[str, list[Piece]]]
    """finds the text, downloading it if needed; returns all splits, none of them empty"""
    vocab: Callable[[], Vocab] | None = None
    """the vocabulary, where the source determines it; valid once `splits` was called"""


def find(config: DataConfig) -> Corpus:
    source = config.source
    if config.copy and source not in NAMED:
        raise ValueError(
            f"from is {config.copy!r}, but {source!r} is not a named corpus; "
            f"expected one of {', '.join(NAMED)} as the source"
        )
    if config.tokens == "pixel":
        return _images(config)
    if source == images.DIGITS and not Path(source).exists():
        raise ValueError(f"source is 'digits' and tokens is {config.tokens!r}; expected tokens 'pixel' for images")
    if source in NAMED:
        return _named(config)
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in _walk(root, NOT_STDLIB) if path.suffix == ".py"]
        return _own("stdlib", root, files, config, keep=_is_text)
    if source == "numbers":
        folder = config.cache_folder() / "generated"
        return Corpus(
            source, [source, numbers.VERSION], lambda _tell: {k: [whole(p)] for k, p in numbers.write(folder).items()}
        )
    made = tasks.parse_task(source) or tasks.parse_facts(source)
    if made is not None:
        return _made(made, config)
    path = expand_home(source, "source")
    check_regular(path, "source")
    if path.is_dir():
        return _own(path.resolve().name, path, _walk(path), config)
    if path.is_file():
        return _own(path.stem, path.parent, [path], config)
    if glob.has_magic(source):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not files:
            raise ValueError(f"source {source!r} matches no file")
        return _own("glob", Path(os.path.commonpath([p.parent.absolute() for p in files])), files, config)
    close = difflib.get_close_matches(source.lower(), SOURCES, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected a path, or one of {', '.join(SOURCES)}"
    raise ValueError(f"source {source!r} does not exist; {hint}")


def _named(config: DataConfig) -> Corpus:
    copy = expand_home(config.copy, "from") if config.copy else None
    if copy and not copy.exists():
        raise ValueError(f"from is {config.copy!r}, which does not exist; expected a copy of {config.source}")
    if copy:
        check_regular(copy, "from")
    # A download is identified by its url and digest, a copy by its present content.
    identity = [config.source, NAMED[config.source].url if not copy else _stamps(copy.parent, _files_in(copy))]

    def splits(on_progress: OnProgress) -> dict[str, list[Piece]]:
        return _none_empty(config, pieces_of(config.source, copy, config.cache_folder() / "downloads", on_progress))

    return Corpus(config.source, identity, splits)


def _made(made: tasks.Task | tasks.Facts, config: DataConfig) -> Corpus:
    if config.tokens != "byte":
        raise ValueError(f"tokens is {config.tokens!r}; expected 'byte', since the tokens of {made.name} are bytes")
    folder = config.cache_folder() / "generated"

    def splits(_on_progress: OnProgress) -> dict[str, list[Piece]]:
        paths = made.write(folder) if isinstance(made, tasks.Facts) else tasks.write(made, folder)
        return {split: [whole(path)] for split, path in paths.items()}

    return Corpus(made.name, [tasks.written(made), made.version], splits)


def _images(config: DataConfig) -> Corpus:
    """The digits, or a folder of PNG files, as raw levels in the cache."""
    source, made = config.source, config.cache_folder() / "generated"
    if source == images.DIGITS:
        name, identity = images.DIGITS, [images.DIGITS, images.VERSION, config.valid, config.test]
        files, root = [], Path()
    else:
        root = expand_home(source, "source")
        if not root.is_dir():
            raise ValueError(f"source is {source!r} and tokens is 'pixel'; expected digits, or a folder of PNG files")
        name, files = root.resolve().name, _walk(root)
        if len(files) < len(SPLITS):
            raise ValueError(f"source {source!r} has {len(files)} files; expected PNG files for {len(SPLITS)} splits")
        identity = [_stamps(root, files), config.valid, config.test, images.VERSION]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def splits(_on_progress: OnProgress) -> dict[str, list[Piece]]:
        if images.written(made, key) is None:
            if source == images.DIGITS:
                images.write(made, key, images.deal_digits(config.valid, config.test), images.Pixels(8, 8, 1, 17))
            else:
                dealt = _split(root, list(map(whole, files)), config)
                images.write(made, key, *images.read_folder({k: [p.path for p in v] for k, v in dealt.items()}))
        return {split: [whole(path)] for split, path in images.raw_files(made, key, SPLITS).items()}

    def vocab() -> Vocab:
        found = images.written(made, key)
        assert found is not None
        return found

    return Corpus(name, ["pixel", identity], splits, vocab)


def _refuse_archives(files: Sequence[Path]) -> None:
    """An archive is not text: its compressed bytes would be read."""
    for path in filter(is_archive, files):
        raise ValueError(f"source {path} is an archive; unpack it and give the folder")


def _own(
    name: str, root: Path, files: Sequence[Path], config: DataConfig, keep: Callable[[Path], bool] = lambda _: True
) -> Corpus:
    """Files below a root, split by their names, or else by the shares."""
    _refuse_archives(files)

    def splits(_on_progress: OnProgress) -> dict[str, list[Piece]]:
        pieces = [piece for piece in map(whole, filter(keep, files)) if len(piece)]
        if not pieces:
            raise ValueError(f"source {config.source!r} is empty; expected some text")
        return _none_empty(config, _split(root, pieces, config))

    return Corpus(name, [_stamps(root, files), config.valid, config.test], splits)


def _split(root: Path, pieces: list[Piece], config: DataConfig) -> dict[str, list[Piece]]:
    if len(pieces) == 1:
        return _cut(pieces[0], config.valid, config.test)
    named: dict[str, list[Piece]] = {split: [] for split in (*SPLITS, "")}
    for piece in pieces:
        named[_split_name(root, piece.path)].append(piece)
    del named[""]
    if all(named.values()):
        return named
    return _deal(root, pieces, config.valid, config.test)


def _split_name(root: Path, path: Path) -> str:
    """The split in the name of a file or folder directly below the root: train.txt, wiki.valid.tokens, test/…"""
    parts = set(_relative(root, path).lower().split("/")[0].split("."))
    return next((split for split, names in OWN_SPLITS.items() if names & parts), "")


def _cut(piece: Piece, valid: float, test: float) -> dict[str, list[Piece]]:
    """Split one file: its end is for testing, the part before that for validation."""
    to_test = piece.stop - round(piece.size * test)
    to_valid = to_test - round(piece.size * valid)
    bounds = {"train": (0, to_valid), "valid": (to_valid, to_test), "test": (to_test, piece.stop)}
    return {split: [replace(piece, start=start, stop=stop)] for split, (start, stop) in bounds.items()}


def _deal(root: Path, pieces: list[Piece], valid: float, test: float) -> dict[str, list[Piece]]:
    """Assign whole files to splits, in the order of a hash of their names, while they fit a split's share of the bytes.

    The order does not depend on other files or on the folder's location. A split that no file fits gets the smallest
    remaining file.
    """
    total = sum(map(len, pieces))
    drawn = sorted(pieces, key=lambda p: hashlib.sha256(_relative(root, p.path).encode()).digest())
    split_of: dict[Path, str] = {}
    for split, share in (("valid", valid), ("test", test)):
        left = [piece for piece in drawn if piece.path not in split_of]
        room, fitting = share * total, []
        for piece in left:
            if len(piece) <= room:
                room -= len(piece)
                fitting.append(piece)
        for piece in fitting or sorted(left, key=len)[:1]:
            split_of[piece.path] = split
    return {split: [p for p in pieces if split_of.get(p.path, "train") == split] for split in SPLITS}


def _none_empty(config: DataConfig, splits: dict[str, list[Piece]]) -> dict[str, list[Piece]]:
    for split in SPLITS:
        if not sum(map(len, splits[split])):
            raise ValueError(
                f"source {config.source!r} leaves nothing for the split {split!r}; "
                "expected more text, a larger share, or three files or more"
            )
    return splits


def _walk(root: Path, without: Set[str] = frozenset()) -> list[Path]:
    """The files below a folder, sorted by name, without hidden ones and without folders of these names."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((p for p in found if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def _files_in(path: Path) -> list[Path]:
    return _walk(path) if path.is_dir() else [path]


def _stamps(root: Path, files: Sequence[Path]) -> list[Any]:
    stats = [(_relative(root, path), path.stat()) for path in files]
    return [str(root.resolve()), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]


def _relative(root: Path, path: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _is_text(path: Path) -> bool:
    """Whether it is UTF-8: some of the standard library's tests deliberately are not."""
    with reading(str(path)):
        data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return 0 not in data
