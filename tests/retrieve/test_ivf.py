"""The index for very large datastores: candidates from faiss, distances from the stored keys."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
import torch

from spanformer.retrieve import search
from spanformer.retrieve.ivf import ABOUT, FILE, build_index, load_faiss, read_index
from support.stores import make_store, random_keys


class Some:
    """An index that finds every third entry only, and too few of them."""

    def candidates(self, queries: torch.Tensor, many: int) -> torch.Tensor:
        ids = torch.full((len(queries), many), -1)
        ids[:, :20] = torch.arange(0, 60, 3)
        return ids


def test_candidates_of_an_index_are_rescored(tmp_path: Path) -> None:
    store, queries = make_store(tmp_path, 60), random_keys(5, seed=9)
    found = search(store, queries, 30, index=Some())
    truth = (queries.double()[:, None] - random_keys(60)[::3].double()).square().sum(-1).sort(dim=1)
    assert torch.equal(found.ids[:, :20], truth.indices * 3) and bool((found.ids[:, 20:] == -1).all())
    assert torch.allclose(found.distances[:, :20], truth.values) and not bool(found.proved.any())


def test_an_index_needs_faiss_and_enough_keys(tmp_path: Path, monkeypatch) -> None:
    store = make_store(tmp_path, 60)
    assert read_index(store) is None
    with pytest.raises(ValueError, match="lists is 28 for 60 entries; expected at most 1"):
        build_index(store)
    with pytest.raises(ValueError, match="nprobe is 9; expected a whole number from 1 to 1"):
        build_index(store, lists=1, nprobe=9)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ImportError, match=r"an index needs faiss: pip install \"spanformer\[knn\]\""):
        load_faiss()


def test_an_index_is_read_back_and_refused_when_it_does_not_fit(tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason='needs faiss: pip install "spanformer[knn]"')
    store, queries = make_store(tmp_path, 400, keys="int8", shard=100), random_keys(6, seed=9)
    build_index(store, lists=4, nprobe=4)  # all lists: nothing is missed
    index = read_index(store)
    assert index is not None
    assert torch.equal(search(store, queries, 5, index=index).ids, search(store, queries, 5).ids)
    odd = queries.clone()
    odd[2, 3] = torch.nan
    assert bool((search(store, odd, 5, index=index).ids[2] == -1).all())
    store.parts.pop()
    with pytest.raises(ValueError, match=r"has 400 keys of 24 numbers; expected \d+ of 24, as the datastore"):
        read_index(store)
    os.truncate(tmp_path / FILE, 100)
    with pytest.raises(ValueError, match=f"{FILE} does not fit its checksum"):
        read_index(store)
    (tmp_path / ABOUT).unlink()
    assert read_index(store) is None


class Faiss:
    """What `read_index` asks of faiss, for machines without it."""

    def __init__(self, ntotal: int, d: int) -> None:
        self.ntotal, self.d = ntotal, d

    def read_index(self, _path: str) -> Faiss:
        return self


@pytest.mark.parametrize("ntotal, d", [(61, 24), (59, 24), (60, 23)])
def test_an_index_of_other_entries_is_refused(tmp_path: Path, monkeypatch, ntotal: int, d: int) -> None:
    store = make_store(tmp_path, 60)
    (tmp_path / FILE).write_bytes(b"an index")
    (tmp_path / ABOUT).write_text(json.dumps({"crc32": zlib.crc32(b"an index"), "nprobe": 2}))
    monkeypatch.setattr("spanformer.retrieve.ivf.load_faiss", lambda: Faiss(ntotal, d))
    with pytest.raises(
        ValueError, match=rf"has {ntotal} keys of {d} numbers; expected 60 of 24, as the datastore: ind"
    ):
        read_index(store)
    monkeypatch.setattr("spanformer.retrieve.ivf.load_faiss", lambda: Faiss(60, 24))
    assert read_index(store) is not None
    os.truncate(tmp_path / FILE, 3)
    with pytest.raises(ValueError, match=f"{FILE} does not fit its checksum: it is damaged; remove it and {ABOUT}"):
        read_index(store)
