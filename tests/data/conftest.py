"""Every test of this room has a cache of its own; real data is used where it is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("SPANFORMER_SHARED", Path(__file__).resolve().parents[2] / ".." / "shared"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPANFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shared():
    """A function from a name to a file of real data, which skips the test if it is not there."""

    def find(name: str) -> Path:
        if not (SHARED / "data" / name).exists():
            pytest.skip(f"no shared data {name}; SPANFORMER_SHARED names its folder")
        return SHARED / "data" / name

    return find
