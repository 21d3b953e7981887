"""Saved folders: whole or not at all, and no damage goes unnoticed."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from spanformer.model import folder
from spanformer.model.folder import NewerFormat, faults, read_meta, read_part, write_folder

META = {"config": {"width": 3, "lr": 0.1 + 0.2}, "names": ["ä", "\udc80"], "none": None}


def parts(value: float = 1.0) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((3, 5), value)}, "optimizer": {"step": torch.tensor(value)}}


def hidden(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, dtype and shape included."""
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


def test_write_and_read_round_trip(tmp_path: Path) -> None:
    kinds = {
        "float": torch.tensor([[1.5, float("nan"), -0.0]]),
        "int": torch.arange(7),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "byte": torch.arange(256).to(torch.uint8),
        "double": torch.tensor([1 / 3], dtype=torch.float64),
    }
    half = torch.randn(9).to(torch.bfloat16)
    write_folder(tmp_path / "new" / "m", {"model": {**kinds, "half": half}, "nothing": {}}, META)
    path = tmp_path / "new" / "m"
    assert faults(path) == []
    meta = read_meta(path)
    assert {key: meta[key] for key in META} == META
    assert meta["format"] == 1 and set(meta["files"]) == {"model.safetensors", "nothing.safetensors"}
    read = read_part(path, "model")
    assert torch.equal(read.pop("half"), half)
    assert set(read) == set(kinds) and all(same(read[name], kinds[name]) for name in kinds)
    assert read_part(path, "nothing") == {}
    assert hidden(path.parent) == []


def test_tied_strided_and_learned_tensors(tmp_path: Path) -> None:
    w = nn.Parameter(torch.randn(4, 6))
    tensors = {"w": w, "tied": w, "turned": w.T, "row": w[1], "column": w[:, 2], "every": torch.arange(10)[::3]}
    write_folder(tmp_path / "m", {"model": tensors, "again": {"w": w}}, {})
    read = read_part(tmp_path / "m", "model")
    assert all(same(read[name], tensor.detach()) for name, tensor in tensors.items())
    assert same(read_part(tmp_path / "m", "again")["w"], w.detach())


def test_distributed_tensor_is_refused(tmp_path: Path) -> None:
    class Sharded(Tensor):
        pass

    with pytest.raises(ValueError, match=r"^w is a Sharded; expected a plain tensor, so gather it first$"):
        write_folder(tmp_path / "m", {"model": {"w": torch.ones(3).as_subclass(Sharded)}}, {})
    assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_folder(tmp_path / "m", parts(), {})
    finally:
        os.umask(before)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "m").iterdir()} == {0o640}


def test_existing_path_is_kept_without_replace(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_folder(path, parts(1), {})
    with pytest.raises(ValueError, match=r"m already exists; choose another name or remove it first$"):
        write_folder(path, parts(2), {})
    assert read_part(path, "model")["w"][0, 0] == 1
    write_folder(path, {"model": parts(2)["model"]}, {}, replace=True)
    assert read_part(path, "model")["w"][0, 0] == 2 and faults(path) == [] and hidden(tmp_path) == []
    assert not (path / "optimizer.safetensors").exists()


def test_only_our_own_folders_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"home holds thesis\.tex, which spanformer did not save; choose another"):
        write_folder(tmp_path / "home", parts(), {}, replace=True)
    with pytest.raises(ValueError, match=r"thesis\.tex is a file; expected a folder that spanformer saved"):
        write_folder(tmp_path / "home" / "thesis.tex", parts(), {}, replace=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_meta_must_be_json(tmp_path: Path) -> None:
    for bad in ({"x": float("nan")}, {"x": torch.zeros(1)}):
        with pytest.raises(
            ValueError, match=r"meta cannot be written as JSON \(.*\); expected strings, finite numbers"
        ):
            write_folder(tmp_path / "m", parts(), bad)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "m", parts(), {"keys": {2: (1, 2), 10: "x"}})
    assert read_meta(tmp_path / "m")["keys"] == {"2": [1, 2], "10": "x"} and faults(tmp_path / "m") == []


def damage(path: Path, change) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flipped(where: float):
    def flip(content: bytearray) -> bytearray:
        content[int(where * (len(content) - 1))] ^= 1
        return content

    return flip


@pytest.mark.parametrize("name", ["model", "optimizer"])
@pytest.mark.parametrize("where", [0.0, 0.1, 0.5, 1.0])
def test_one_flipped_bit_is_found(tmp_path: Path, name: str, where: float) -> None:
    path = tmp_path / "m"
    write_folder(path, parts(), META)
    damage(path / f"{name}.safetensors", flipped(where))
    assert faults(path) == [f"{path}/{name}.safetensors has changed since it was written"]


def test_any_flipped_bit_of_meta_is_found_or_means_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_folder(path, parts(), META)
    whole, meta = (path / "meta.json").read_bytes(), read_meta(path)
    found = 0
    for at in range(len(whole)):
        (path / "meta.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        try:
            here = faults(path)
        except NewerFormat:
            here = ["newer"]
        found += bool(here)
        assert here or read_meta(path) == meta
    assert found > 0.9 * len(whole)  # the rest is white space


@pytest.mark.parametrize("length", [0, 1, 7, 8, 50, -1])
def test_truncated_files(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m"
    write_folder(path, parts(), {})
    size = (path / "model.safetensors").stat().st_size
    damage(path / "model.safetensors", lambda content: content[:length])
    left = length if length >= 0 else size + length
    assert faults(path) == [f"{path}/model.safetensors has {left} bytes; expected {size}"]
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read \(.*\); the file is damaged$"):
        read_part(path, "model")
    damage(path / "meta.json", lambda content: content[: abs(length)])
    assert [fault.split(" (")[0] for fault in faults(path)] == [f"{path}/meta.json cannot be read"]


def test_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write_folder(path, parts(), {})
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")  # reading it would wait for ever
    (path / "optimizer.safetensors").unlink()
    assert faults(path) == [f"{path}/model.safetensors is missing", f"{path}/optimizer.safetensors is missing"]
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; the folder is incomplete"):
        read_part(path, "model")
    with pytest.raises(ValueError, match=r"m has no part 'memory'; expected one of model, optimizer$"):
        read_part(path, "memory")
    (path / "meta.json").unlink()
    assert faults(path) == [f"{path} has no meta.json; expected a folder that spanformer saved"]
    assert faults(tmp_path / "n") == [f"{tmp_path}/n is not a folder; expected one that spanformer saved"]


def refused(path: Path, content: bytes) -> str:
    (path / "meta.json").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_meta(path)
    return str(error.value)


def test_foreign_meta_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000):
        assert refused(tmp_path, content).endswith("the file is damaged")
    for content in (b"3", b"[]", b"{}", b'{"kind": "spanformer attention benchmark", "format": 1}'):
        assert "was not written by spanformer; expected a folder that spanformer saved" in refused(tmp_path, content)
    ours = {"kind": folder.KIND, "format": 1}
    for files in (None, [], {"a": {}}, {"../a.safetensors": {"size": 1, "sha256": ""}}, {"a.safetensors": {"size": 1}}):
        assert "does not list its files" in refused(tmp_path, json.dumps({**ours, "files": files}).encode())
    newer = json.dumps({**ours, "format": 3, "files": "moved"}).encode()
    assert refused(tmp_path, newer) == (
        f"{tmp_path} was written by a newer spanformer (format 3; this one reads up to 1); upgrade spanformer"
    )
    with pytest.raises(NewerFormat):
        faults(tmp_path)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("where", ["save_file", "sync", "_digest", "json", "rename"])
def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, replace: bool) -> None:
    path = tmp_path / "m"
    if replace:
        write_folder(path, parts(1), {})

    def fail(*_: object, **__: object) -> None:
        raise FULL

    with monkeypatch.context() as patch:
        if where == "rename":
            rename = Path.rename
            patch.setattr(Path, "rename", lambda a, b: fail() if a.name.endswith("new") else rename(a, b))
        elif where == "json":
            patch.setattr(Path, "write_text", fail)
        else:
            patch.setattr(folder, where, fail)
        with pytest.raises(OSError) as error:
            write_folder(path, parts(2), {}, replace=replace)
    assert str(error.value) == (
        f"{path} could not be saved (No space left on device); earlier files are unchanged, "
        "so make room or choose another folder"
    )
    assert hidden(tmp_path) == []
    assert path.exists() == replace
    if replace:
        assert faults(path) == [] and read_part(path, "model")["w"][0, 0] == 1


def test_full_file_system(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", parts(), {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match=r"a could not be saved \(File too large\); earlier files are unchanged"):
            write_folder(tmp_path / "a", {"model": {"w": torch.zeros(100, 100)}}, {}, replace=True)
        with pytest.raises(OSError, match=r"a could not be saved \(File too large\)"):
            write_folder(tmp_path / "a", {}, {"long": "x" * 10_000}, replace=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert hidden(tmp_path) == [] and faults(tmp_path / "a") == []


def test_unwritable_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"file/m could not be saved \(\w.*\); earlier files are unchanged"):
        write_folder(tmp_path / "file" / "m", parts(), {})

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(OSError, match=r"m could not be saved \(Permission denied\); .* or choose another folder$"):
        write_folder(tmp_path / "m", parts(), {})


def test_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder, "_digest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "m", parts(), {})
    assert list(tmp_path.iterdir()) == []
