"""A folder of safetensors files and one JSON file: what a model or a checkpoint is saved as.

    PATH/meta.json           what the caller says, the format, the version, and the size and SHA-256 of every other file
    PATH/NAME.safetensors    one for every part, or several: see part.py

Written whole or not at all (core/files.py). Read as untrusted: nothing in it is executed, and an error names in one
sentence what does not fit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from spanformer.core.files import hidden_folder, put_folder, sync
from spanformer.core.version import VERSION
from spanformer.model.part import Part, reason

KIND = "spanformer folder"
FORMAT = 1
META = "meta.json"
OURS = ("kind", "format", "version", "files", "sha256")
"""The keys of meta.json that are not the caller's."""

Files = dict[str, dict[str, int | str]]
"""name → size and sha256"""

_PART = re.compile(r"[A-Za-z0-9_-]+")
_PIECE = re.compile(r"-\d{5}-of-\d{5}$")
_LONGEST_META = 256 << 20  # bytes; a longer one is not ours


class NewerFormat(ValueError):
    """It may be whole, but only a newer spanformer can tell."""


def write_folder(
    path: Path,
    parts: dict[str, dict[str, Tensor]],
    meta: dict,
    *,
    replace: bool = False,
    others: Callable[[Path], Files] | None = None,
) -> None:
    """Save the parts and the caller's meta (JSON values) as the folder `path`, whole or not at all.

    With `replace`, a folder already there makes way once the new one is complete on the disk. `others` adds what other
    processes write, by `write_part`, into the hidden folder it is given.
    """
    assert not set(OURS) & set(meta), "these keys are the folder's own"
    assert all(_PART.fullmatch(name) for name in parts), "a part is named by letters, digits, _ and -"
    if path.exists():
        _check_replaceable(path, replace)
    try:
        with hidden_folder(path) as new:
            _fill(new, parts, meta, others)
            put_folder(new, path, replace=replace)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be saved ({reason(error)}); nothing saved before was touched, "
            "so make room or choose another folder"
        ) from error


def read_meta(path: Path) -> dict:
    """What meta.json holds: the caller's keys beside `OURS`."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; expected one that spanformer saved")
    if not (path / META).is_file():
        raise ValueError(f"{path} has no {META}; expected a folder that spanformer saved")
    try:
        if (size := (path / META).stat().st_size) > _LONGEST_META:
            raise ValueError(f"{size} bytes are too many")
        meta = json.loads((path / META).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path / META} cannot be read ({reason(error)}); the file is damaged") from error
    if not isinstance(meta, dict) or meta.get("kind") != KIND or not isinstance(meta.get("format"), int):
        raise ValueError(f"{path / META} is of another kind; expected a folder that spanformer saved")
    if meta["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer spanformer (format {meta['format']}; this one reads up to {FORMAT}); "
            "upgrade spanformer"
        )
    if not _is_list_of_files(meta.get("files")):
        raise ValueError(f"{path / META} does not list its files with size and sha256; the file is damaged")
    return meta


def write_part(folder: Path, name: str, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> Files:
    """One file of a folder that is being written, on the disk when this returns; its name, size and digest."""
    file = _file(folder, name)
    save_file(_apart(tensors), file, header)
    file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes files for the owner alone; the umask made the folder
    sync(file)
    return {file.name: {"size": file.stat().st_size, "sha256": _digest(file)}}


def parts_of(meta: dict) -> list[str]:
    """The names of the parts that a folder's meta lists."""
    return list(dict.fromkeys(_part_of(file) for file in meta["files"]))


def open_part(path: Path, name: str) -> Part:
    """One part, to be read. Only the structure of its files is checked here; `faults` also checks their content."""
    meta = read_meta(path)
    files = [path / file for file in meta["files"] if _part_of(file) == name]
    if not files:
        raise ValueError(f"{path} has no part {name!r}; expected one of {', '.join(parts_of(meta))}")
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{missing[0]} is missing; the folder is not whole")
    return Part(files)


def read_part(path: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one part, whole."""
    return {tensor: value.to(device) for tensor, value in open_part(path, name).items()}


def faults(path: Path) -> list[str]:
    """Every reason why the folder is not whole, each naming a file; none if it is as it was written."""
    try:
        meta = read_meta(path)
    except NewerFormat:
        raise
    except ValueError as error:
        return [str(error)]
    found = [] if meta.get("sha256") == _digest_of_meta(meta) else [f"{path / META} has another content than written"]
    for name, said in meta["files"].items():
        file = path / name
        try:
            if not file.is_file():
                found.append(f"{file} is missing")
            elif (size := file.stat().st_size) != said["size"]:
                found.append(f"{file} has {size} bytes; expected {said['size']}")
            elif _digest(file) != said["sha256"]:
                found.append(f"{file} has another content than written")
        except OSError as error:
            found.append(f"{file} cannot be read ({reason(error)})")
    return found


def _check_replaceable(path: Path, replace: bool) -> None:
    if not replace:
        raise ValueError(f"{path} already exists; choose another name or remove it first")
    if not path.is_dir():
        raise ValueError(f"{path} is a file; expected a folder that spanformer saved, or nothing yet")
    foreign = sorted(file.name for file in path.iterdir() if file.name != META and file.suffix != ".safetensors")
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]}, which spanformer did not save; choose another folder")


def _fill(new: Path, parts: dict[str, dict[str, Tensor]], meta: dict, others: Callable[[Path], Files] | None) -> None:
    """Write every file and wait until the disk has them."""
    files: Files = {}
    for name, tensors in parts.items():
        files |= write_part(new, name, tensors)
    if others is not None:
        files |= others(new)
    whole = _as_json({"kind": KIND, "format": FORMAT, "version": VERSION, "files": files, **meta})
    whole["sha256"] = _digest_of_meta(whole)
    (new / META).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    sync(new / META)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, which is what safetensors takes; tied ones are written twice."""
    apart, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if type(tensor) is not Tensor:
            raise ValueError(f"{name} is a {type(tensor).__name__}; expected a plain tensor, so gather it first")
        storage = tensor.untyped_storage().data_ptr()
        shared = storage in storages
        apart[name] = tensor.clone(memory_format=torch.contiguous_format) if shared else tensor.contiguous()
        storages.add(storage)
    return apart


def _is_list_of_files(files: object) -> bool:
    return isinstance(files, dict) and all(
        file.endswith(".safetensors")
        and _PART.fullmatch(file.removesuffix(".safetensors"))  # so that no name leads out of the folder
        and isinstance(said, dict)
        and {"size", "sha256"} <= set(said)
        for file, said in files.items()
    )


def _part_of(file: str) -> str:
    return _PIECE.sub("", file.removesuffix(".safetensors"))


def _file(path: Path, name: str) -> Path:
    return path / f"{name}.safetensors"


def _digest(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of_meta(meta: dict) -> str:
    """Of everything but itself."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _as_json(meta: dict) -> dict:
    """What a reader will find: tuples as lists, keys as texts."""
    try:
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta cannot be written as JSON ({error}); expected texts, finite numbers and lists"
        ) from None
