"""Named corpora: their URLs, files, splits and digests.

Only verified digests are listed: of the text of enwik8 and text8 (published by their author), and of the archive of
WikiText-103. WikiText-2 has none at its present host; the checksums inside the zip are used instead.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from spanformer.core.paths import check_regular
from spanformer.core.progress import OnProgress
from spanformer.data.download import download
from spanformer.data.pieces import Piece, is_archive, members, open_stream, reading, whole

SPLITS = ("train", "valid", "test")
MILLION = 1_000_000


@dataclass(frozen=True)
class Named:
    url: str
    files: dict[str, tuple[str, ...]]
    """split → possible names of its file"""
    cuts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """split → (start, stop) in bytes, where all splits are in one file"""
    archive_digest: str = ""
    """of the downloaded file"""
    text_digest: str = ""
    """of the single unpacked file"""


def _hundred_million_bytes(name: str, text_digest: str) -> Named:
    """enwik8 and text8 are cut alike: 90, 5 and 5 million bytes."""
    return Named(
        f"https://mattmahoney.net/dc/{name}.zip",
        dict.fromkeys(SPLITS, (name,)),
        {
            "train": (0, 90 * MILLION),
            "valid": (90 * MILLION, 95 * MILLION),
            "test": (95 * MILLION, 100 * MILLION),
        },
        text_digest=text_digest,
    )


def _wikitext(name: str, archive_digest: str = "") -> Named:
    return Named(
        f"https://wikitext.smerity.com/{name}-v1.zip",
        {split: (f"wiki.{split}.tokens", f"{split}.txt") for split in SPLITS},
        archive_digest=archive_digest,
    )


NAMED = {
    "enwik8": _hundred_million_bytes(
        "enwik8", "sha256:2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"
    ),
    "text8": _hundred_million_bytes("text8", "md5:3bea1919949baf155f99411df5fada7e"),
    "wikitext-2": _wikitext("wikitext-2"),
    "wikitext-103": _wikitext("wikitext-103", "md5:9ddaacaf6af0710eda8c456decff7832"),
}


def pieces_of(name: str, copy: Path | None, downloads: Path, on_progress: OnProgress) -> dict[str, list[Piece]]:
    """The splits of a named corpus, from a copy or a download."""
    corpus = NAMED[name]
    path = copy or downloads / corpus.url.rpartition("/")[2]
    if not copy and not path.exists():
        downloads.mkdir(parents=True, exist_ok=True)
        download(corpus.url, path, digest=corpus.archive_digest, on_progress=on_progress)
    places = {split: _place(path, names) for split, names in corpus.files.items()}
    if corpus.text_digest:
        try:
            _check_text(name, *places["train"])
        except ValueError:
            if not copy:
                path.unlink()  # so that the next call downloads it again
            raise
    if not corpus.cuts:
        return {split: [whole(*place)] for split, place in places.items()}
    size = max(stop for _, stop in corpus.cuts.values())
    return {split: [Piece(*places[split], size, start, stop)] for split, (start, stop) in corpus.cuts.items()}


def _place(path: Path, names: tuple[str, ...]) -> tuple[Path, str]:
    """(file, archive member) that has one of these names: in an archive, in a folder, or the file itself."""
    if is_archive(path):
        held = members(path)
        found = [(path, member) for member in held if PurePosixPath(member).name in names]
    elif path.is_dir():
        with reading(str(path)):
            held = sorted(p.name for p in path.iterdir())
        found = [(path / name, "") for name in held if name.removesuffix(".gz") in names]
    else:
        held = [path.name]
        found = [(path, "")] if len(names) == 1 else []  # several names: a corpus of several files
    if not found:
        listed = ", ".join(held[:5]) + (", …" if len(held) > 5 else "") if held else "nothing"
        raise ValueError(f"{path} holds {listed}; expected a file named {' or '.join(names)}")
    check_regular(found[0][0], "the copy")
    return found[0]


def _check_text(name: str, path: Path, member: str) -> None:
    expected = NAMED[name].text_digest
    algorithm = expected.partition(":")[0]
    digest = hashlib.new(algorithm)
    with open_stream(path, member) as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    found = f"{algorithm}:{digest.hexdigest()}"
    if found != expected:
        raise ValueError(
            f"{path} is not {name}: its text has {found}; expected {expected}; "
            "for a text of your own give its path as --data.source"
        )
