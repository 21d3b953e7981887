"""A folder of safetensors files and one JSON file: the format of saved models and checkpoints.

    PATH/meta.json           the caller's data, the format, the version, and the size and SHA-256 of every other file
    PATH/NAME.safetensors    one for every part, or several: see part.py

Written completely or not at all (core/files.py). Read as untrusted data: nothing in it is executed, and an error says
in one sentence what is wrong.
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
_LONGEST_META = 256 << 20  # bytes; no meta.json of ours is longer


class NewerFormat(ValueError):
    """The folder has a newer format, which this version of spanformer cannot read."""


def write_folder(
    path: Path,
    parts: dict[str, dict[str, Tensor]],
    meta: dict,
    *,
    replace: bool = False,
    others: Callable[[Path], Files] | None = None,
) -> None:
    """Save the parts and the caller's meta (JSON values) as the folder `path`, completely or not at all.

    With `replace`, the new folder replaces an existing one once it is complete on the disk. `others` adds the files
    that other processes write, by `write_part`, to the hidden folder that it receives.
    """
    assert not set(OURS) & set(meta), "these keys are reserved for the folder"
    assert all(_PART.fullmatch(name) for name in parts), "the name of a part has letters, digits, _ and -"
    if path.exists():
        _check_replaceable(path, replace)
    try:
        with hidden_folder(path) as new:
            _fill(new, parts, meta, others)
            put_folder(new, path, replace=replace)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} could not be saved ({reason(error)}); earlier files are unchanged, "
            "so make room or choose another folder"
        ) from error


def read_meta(path: Path) -> dict:
    """The content of meta.json: the caller's keys and `OURS`."""
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
        raise ValueError(f"{path / META} was not written by spanformer; expected a folder that spanformer saved")
    if meta["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer spanformer (format {meta['format']}; this one reads up to {FORMAT}); "
            "upgrade spanformer"
        )
    if not _is_list_of_files(meta.get("files")):
        raise ValueError(f"{path / META} does not list its files with size and sha256; the file is damaged")
    return meta


def write_part(folder: Path, name: str, tensors: dict[str, Tensor], header: dict[str, str] | None = None) -> Files:
    """Write one file of a folder and wait until it is on the disk; return its name, size and digest."""
    file = _file(folder, name)
    save_file(_apart(tensors), file, header)
    # safetensors makes files readable by the owner only; use the folder's mode, which follows the umask
    file.chmod(folder.stat().st_mode & 0o666)
    sync(file)
    return {file.name: {"size": file.stat().st_size, "sha256": _digest(file)}}


def parts_of(meta: dict) -> list[str]:
    """The names of the parts that a folder's meta lists."""
    return list(dict.fromkeys(_part_of(file) for file in meta["files"]))


def open_part(path: Path, name: str) -> Part:
    """Open one part. Only the structure of its files is checked here; `faults` also checks their content."""
    meta = read_meta(path)
    files = [path / file for file in meta["files"] if _part_of(file) == name]
    if not files:
        raise ValueError(f"{path} has no part {name!r}; expected one of {', '.join(parts_of(meta))}")
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{missing[0]} is missing; the folder is incomplete")
    return Part(files)


def read_part(path: Path, name: str, device: str = "cpu") -> dict[str, Tensor]:
    """All tensors of one part."""
    return {tensor: value.to(device) for tensor, value in open_part(path, name).items()}


def faults(path: Path) -> list[str]:
    """Every difference between the folder and what was written, each naming a file; [] if there is none."""
    try:
        meta = read_meta(path)
    except NewerFormat:
        raise
    except ValueError as error:
        return [str(error)]
    found = [] if meta.get("sha256") == _digest_of_meta(meta) else [f"{path / META} has changed since it was written"]
    for name, said in meta["files"].items():
        file = path / name
        try:
            if not file.is_file():
                found.append(f"{file} is missing")
            elif (size := file.stat().st_size) != said["size"]:
                found.append(f"{file} has {size} bytes; expected {said['size']}")
            elif _digest(file) != said["sha256"]:
                found.append(f"{file} has changed since it was written")
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
    """Write every file and wait until it is on the disk."""
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
    """Contiguous tensors that share no memory, as safetensors needs; tied ones are written twice."""
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
        and _PART.fullmatch(file.removesuffix(".safetensors"))  # so that no name points outside the folder
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
    """The digest of everything except the digest itself."""
    rest = {key: value for key, value in meta.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _as_json(meta: dict) -> dict:
    """The value as a reader will get it: tuples as lists, keys as strings."""
    try:
        return json.loads(json.dumps(meta, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta cannot be written as JSON ({error}); expected strings, finite numbers, lists and dicts of them"
        ) from None
