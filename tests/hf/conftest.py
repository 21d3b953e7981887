"""Tiny models gain nothing from several threads; on a machine with other work they lose much."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.byte_llama import PROSE, save_byte_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of bytes, as Hugging Face saves it, and prose.txt."""
    path = tmp_path_factory.mktemp("model")
    save_byte_llama(path, 256)
    (path / "prose.txt").write_text(PROSE * 40)
    return path
