"""A folder in which the commands of the documentation run: a checkout's files, and small stand-ins for what a reader
has or downloads."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from spanformer.data import corpora
from support.byte_llama import save_byte_llama
from support.images import write_digits
from support.original_model import Shape, random_state
from support.tiny_runs import write_text

ROOT = Path(__file__).resolve().parents[2]
HUB = "HuggingFaceTB/SmolLM2-135M"
"""transformers takes a folder of this name before it asks the hub"""


def small_enwik8(monkeypatch: pytest.MonkeyPatch) -> None:
    """enwik8 becomes a corpus of 30,000 bytes."""
    cuts = {"train": (0, 20_000), "valid": (20_000, 25_000), "test": (25_000, 30_000)}
    files = dict.fromkeys(cuts, ("enwik8",))
    monkeypatch.setitem(corpora.NAMED, "enwik8", corpora.Named("https://example.org/enwik8.zip", files, cuts))


def make_workspace(folder: Path) -> None:
    for name in ("runs", "src", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    text = write_text(folder / "text.txt", 30_000).read_bytes()[:30_000]
    (folder / "cache" / "downloads").mkdir(parents=True)
    with zipfile.ZipFile(folder / "cache" / "downloads" / "enwik8.zip", "w") as archive:
        archive.writestr("enwik8", text)
    shutil.copy(folder / "cache" / "downloads" / "enwik8.zip", folder / "enwik8.zip")
    _write_original(folder)
    write_digits(folder / "packages", 200)
    save_byte_llama(folder / HUB, 2048)


def _write_original(folder: Path) -> None:
    """A checkpoint of the paper's code, and the text that its words come from."""
    model = {f"module.{name}": tensor.float() for name, tensor in random_state(Shape(vocab=5)).items()}
    torch.save({"model": model, "iter_no": 1}, folder / "enwik8.pt")
    (folder / "train.txt").write_text("84 104 101 84\n97\n" * 3)
