"""Datastores on disk: what is written is read, damage and other models are refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from spanformer.core.lock import FolderInUse
from spanformer.retrieve import Header, Store, search
from spanformer.retrieve.mixture import Settings, read_settings
from spanformer.retrieve.writer import check_maker, check_room, open_writer
from support.stores import DIM, MAKER, VOCAB, make_store, random_keys, random_tokens

BYTES = {"float32": 4 * DIM + 2, "float16": 2 * DIM + 2, "int8": DIM + 6}


@pytest.mark.parametrize("keys", ["float32", "float16", "int8"])
@pytest.mark.parametrize("pca", [0, 7])
def test_entries_are_read_back_within_the_stated_error(tmp_path: Path, keys, pca: int) -> None:
    store = make_store(tmp_path, 101, keys=keys, pca=pca)
    assert len(store) == 101 and len(store.parts) == 3
    assert store.tokens.tolist() == random_tokens(101).tolist()
    read = torch.cat([p.keys.float() * (1.0 if p.scales is None else p.scales[:, None]) for p in store.parts])
    if store.pca is not None:
        read = read @ store.pca.directions + store.pca.mean
    off = (read - random_keys(101)).norm(dim=-1)
    assert float(off.max()) <= store.error * 1.00001 + 1e-6
    if keys == "int8" and not pca:
        assert store.error <= float(random_keys(101).abs().amax()) / 254 * DIM**0.5
    on_disk = sum(p.stat().st_size for p in tmp_path.glob("shard-*/*.bin"))
    assert on_disk == store.bytes() == 101 * store.header.entry_bytes
    if not pca:
        assert store.header.entry_bytes == BYTES[keys]


def test_an_int8_entry_of_smollm2_has_582_bytes() -> None:
    assert Header(576, 49152, MAKER).entry_bytes == 582
    assert Header(576, 70000, MAKER).token_bytes == 4  # 267,744 words in 16 bits would wrap


@pytest.mark.parametrize("keys", ["float32", "float16", "int8"])
@pytest.mark.parametrize("count, k", [(1, 1), (33, 5), (101, 31), (101, 200)])
def test_search_finds_the_nearest_of_all_shards(tmp_path: Path, keys, count: int, k: int) -> None:
    store, queries = make_store(tmp_path, count, keys=keys), random_keys(7, seed=9)
    read = torch.cat([p.keys.double() * (1.0 if p.scales is None else p.scales[:, None].double()) for p in store.parts])
    truth = (queries.double()[:, None] - read).square().sum(-1)
    found, by_codes = search(store, queries, k), search(store, queries, k, exact=False)
    assert torch.equal(found.ids, by_codes.ids) and torch.equal(found.distances, by_codes.distances)
    best = truth.sort(dim=1, stable=True)
    many = min(k, count)
    assert torch.equal(found.ids[:, :many], best.indices[:, :many])
    assert torch.allclose(found.distances[:, :many], best.values[:, :many], rtol=1e-12)
    assert bool((found.ids[:, many:] == -1).all()) and bool(found.distances[:, many:].isinf().all())


def test_the_certificate_is_right_where_it_is_given(tmp_path: Path) -> None:
    store, queries = make_store(tmp_path, 900, shard=300), random_keys(40, seed=9)
    truth = (queries.double()[:, None] - random_keys(900).double()).square().sum(-1).topk(3, largest=False)
    few, many = (search(store, queries, 3, candidates=n, exact=False) for n in (3, 200))
    whole = search(store, queries, 3, exact=True)
    assert torch.equal(whole.ids, truth.indices) and float(whole.proved.float().mean()) > 0.9
    for found in (few, many):
        right = (found.ids == truth.indices).all(1)
        assert bool(right[found.proved].all())
    assert bool(many.proved.all()) and not bool(few.proved.all())


def test_an_empty_store_and_odd_queries_find_nothing(tmp_path: Path) -> None:
    with open_writer(tmp_path / "none", Header(DIM, VOCAB, MAKER)):
        pass
    assert bool((search(Store(tmp_path / "none"), random_keys(3), 4).ids == -1).all())
    queries = random_keys(3)
    queries[1, 5] = torch.nan
    found = search(make_store(tmp_path / "some", 50), queries, 4)
    assert bool((found.ids[1] == -1).all()) and not bool(found.proved[1]) and bool((found.ids[[0, 2]] >= 0).all())


def test_appending_continues_the_numbers(tmp_path: Path) -> None:
    make_store(tmp_path, 50)
    with open_writer(tmp_path, Header(DIM, VOCAB, MAKER, "float32", 0, 16)) as writer:
        writer.add(random_keys(9, seed=5), random_tokens(9, seed=5), "more", 0)
    store = Store(tmp_path)
    assert len(store) == 59 and store.done("text") == 50 and store.done("more") == 9 and store.done("none") == 0
    assert int(search(store, random_keys(9, seed=5)[3:4], 1).ids) == 53


def test_a_killed_writer_leaves_complete_shards(tmp_path: Path) -> None:
    header = Header(DIM, VOCAB, MAKER, "float32", 0, 16)
    with pytest.raises(RuntimeError), open_writer(tmp_path, header, entries=32) as writer:
        for at in range(0, 48, 16):
            writer.add(random_keys(16), random_tokens(16), "text", at)
        raise RuntimeError("killed")
    assert len(Store(tmp_path)) == 32 and Store(tmp_path).done("text") == 32
    assert not list(tmp_path.glob(".shard*"))
    with pytest.raises(KeyboardInterrupt), open_writer(tmp_path, header, entries=32) as writer:
        writer.add(random_keys(16), random_tokens(16), "text", 32)
        raise KeyboardInterrupt
    assert Store(tmp_path).done("text") == 48


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch) -> None:
    make_store(tmp_path, 50)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spanformer.retrieve.writer._Open.add", full)
    header = Header(DIM, VOCAB, MAKER, "float32", 0, 16)
    sentence = r"could not be written \(No space left on device\); shards that are complete are kept: make room"
    with pytest.raises(OSError, match=sentence), open_writer(tmp_path, header) as writer:
        writer.add(random_keys(4), random_tokens(4), "text", 50)
    assert len(Store(tmp_path)) == 50
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(ValueError, match=r"would take 0.0 GB for 9 entries of 98 bytes, and 0.0 GB are free"):
        check_room(tmp_path, header, 9)


def test_two_writers_are_one_too_many(tmp_path: Path) -> None:
    header = Header(DIM, VOCAB, MAKER)
    with (
        open_writer(tmp_path, header),
        pytest.raises(FolderInUse, match=r"is in use by process \d+"),
        open_writer(tmp_path, header),
    ):
        pass


@pytest.mark.parametrize("refused", ["mkdir", "write"])
def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch, refused: str) -> None:
    """Root may write everywhere, so the refusals of the system are made here."""

    def denied(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(*((Path, "mkdir") if refused == "mkdir" else (os, "open")), denied)
    sentence = r"could not be written \(Permission denied\); .* give write permission and run the same command again"
    with pytest.raises(OSError, match=sentence), open_writer(tmp_path, Header(DIM, VOCAB, MAKER)):
        pass


def change(name: str, **values):
    def damage(folder: Path) -> None:
        said = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(said | values))

    return damage


def swap(name: str, at: int, value: bytes):
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[at : at + len(value)] = value
        (folder / name).write_bytes(bytes(content))

    return damage


DAMAGED = {
    "no store": (lambda f: (f / "store.json").unlink(), "is no datastore: it has no store.json"),
    "no JSON": (lambda f: (f / "store.json").write_text("{"), "store.json could not be read"),
    "no object": (lambda f: (f / "store.json").write_text("3"), "holds no object"),
    "another file": (change("store.json", kind="x"), "has kind 'x'"),
    "a newer format": (change("store.json", format=2), "has format 2; this version reads 1"),
    "another byte order": (change("store.json", byte_order="big"), "has byte order 'big' and this machine 'little'"),
    "no model": (change("store.json", maker=None), "does not say which model made it"),
    "keys": (change("store.json", keys="pickle"), "keys is 'pickle'; expected one of"),
    "dim": (change("store.json", dim=-1), "dim is -1; expected a whole number"),
    "cut": (lambda f: os.truncate(f / "shard-000001/keys.bin", 100), "keys.bin has 100 bytes; expected .* is cut"),
    "appended to": (
        lambda f: (f / "shard-000000/tokens.bin").write_bytes(bytes(200)), "tokens.bin has 200 bytes; expected 96"
    ),
    "missing": (lambda f: (f / "shard-000000/keys.bin").unlink(), "keys.bin has 0 bytes"),
    "half-written": (lambda f: (f / "shard-000001/shard.json").unlink(), "shard.json is missing"),
    "a missing shard": (lambda f: shutil.rmtree(f / "shard-000000"), "has shard-000001 where shard-000000 is expected"),
    "a wrong bit": (swap("shard-000000/keys.bin", 7, b"\xff"), "keys.bin does not fit its checksum"),
    "a wrong count": (change("shard-000000/shard.json", count=1 << 60), "count is 1152921504606846976"),
    "no count": (change("shard-000000/shard.json", count=None), "count is None"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_store_is_refused(tmp_path: Path, name: str) -> None:
    damage, sentence = DAMAGED[name]
    make_store(tmp_path, 80)
    damage(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        Store(tmp_path)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path, 48)
    change("store.json", vocab=3)(tmp_path)
    with pytest.raises(ValueError, match=r"has the token \d+; expected ids of the vocabulary, 0 … 2"):
        Store(tmp_path)
    sentence = "tokens has ids from 50 to 50; expected ids of the vocabulary, 0 … 49"
    with open_writer(tmp_path / "new", Header(DIM, VOCAB, MAKER)) as writer, pytest.raises(ValueError, match=sentence):
        writer.add(random_keys(1), np.array([50]), "text", 0)


def test_damaged_directions_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path, 80, pca=5)
    swap("pca.bin", 11, b"\x99")(tmp_path)
    with pytest.raises(ValueError, match=r"pca.bin does not fit its checksum"):
        Store(tmp_path)
    os.truncate(tmp_path / "pca.bin", 9)
    with pytest.raises(ValueError, match=r"pca.bin is missing or has not 580 bytes"):
        Store(tmp_path)


@pytest.mark.parametrize("field, sentence", [
    ("digest", "with another set of weights, spans or settings"),
    ("key", "another kind of key: 'a key', and this model"),
    ("dtype", "another dtype: 'float32', and this model has 'x'"), ("tokenizer", "another tokenizer"),
])  # fmt: skip
def test_a_store_of_another_model_is_refused(tmp_path: Path, field: str, sentence: str) -> None:
    """Of the same width: nothing else would show it."""
    store = make_store(tmp_path, 20)
    with pytest.raises(ValueError, match=rf"was built by a model \(toy\) {sentence}|{sentence}"):
        check_maker(tmp_path, store.header, replace(MAKER, **{field: "x"}))
    with (
        pytest.raises(ValueError, match=sentence),
        open_writer(tmp_path, replace(store.header, maker=replace(MAKER, **{field: "x"}))),
    ):
        pass


def test_keys_are_not_stored_in_two_ways(tmp_path: Path) -> None:
    store = make_store(tmp_path, 20)
    with (
        pytest.raises(ValueError, match="has keys float32; expected the same to append to it, and int8 is asked for"),
        open_writer(tmp_path, replace(store.header, keys="int8")),
    ):
        pass


def test_bad_keys_are_refused(tmp_path: Path) -> None:
    with open_writer(tmp_path / "half", Header(DIM, VOCAB, MAKER, "float16")) as writer:
        with pytest.raises(ValueError, match=r"keys has shape .3, 5. and tokens .3."):
            writer.add(torch.zeros(3, 5), random_tokens(3), "text", 0)
        with pytest.raises(ValueError, match="1 of 3 keys hold numbers that are not finite, from entry 40 of the text"):
            writer.add(torch.tensor([0.0, torch.nan, 1.0])[:, None].expand(3, DIM), random_tokens(3), "text", 40)
        with pytest.raises(ValueError, match="a key holds 70,000, above 65,504, the largest number of float16"):
            writer.add(torch.full((1, DIM), 7e4), random_tokens(1), "text", 0)


@pytest.mark.parametrize("call, sentence", [
    (lambda s: search(s, random_keys(2, 9), 3), "queries has shape .2, 9.; expected .Q, 24., as the datastore's keys"),
    (lambda s: search(s, random_keys(2), 0), "k is 0; expected 1 or more"),
    (lambda s: Settings(k=0), "k is 0; expected a whole number from 1"),
    (lambda s: Settings(temperature=-1), "temperature is -1; expected 0 or more"),
    (lambda s: Settings(temperature=float("nan")), "temperature is nan"),
    (lambda s: Settings(share=1.5), "share is 1.5; expected λ from 0"),
    (lambda s: Settings(share=float("nan")), "share is nan; expected a finite number"),
    (lambda s: read_settings(s.folder), "has no fit.json: temperature and λ depend on the model's keys"),
    (lambda s: (s.folder / "fit.json").write_text('{"k": 1}') and read_settings(s.folder), "fit.json is damaged"),
])  # fmt: skip
def test_bad_arguments_are_refused(tmp_path: Path, call, sentence: str) -> None:
    store = make_store(tmp_path, 20)
    with pytest.raises(ValueError, match=sentence):
        call(store)


def test_settings_are_read_back(tmp_path: Path) -> None:
    for settings in (Settings(5, float("inf"), 0.125), Settings(7, 0.0, 1.0, fitted_on={"tokens": 3})):
        settings.write(tmp_path)
        assert read_settings(tmp_path) == settings
