"""Parts of saved folders: whole tensors and rows of them, from one file and from several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spanformer.model.folder import faults, open_part, parts_of, read_meta, read_part, write_folder, write_part
from spanformer.model.part import HEADER, Part, header

WHOLE = {
    "w": torch.randn(7, 3),
    "b": torch.randn(5).to(torch.bfloat16),
    "one row": torch.randn(1, 4),
    "count": torch.tensor(3),
    "none": torch.zeros(4, 0),
}


def pieces(cuts: tuple[int, ...]) -> list[dict[str, tuple[int, Tensor]]]:
    """What each of several files holds: rows up to each cut, and scalars in the first."""
    files, start = [], 0
    for stop in (*cuts, 99):
        held = {n: (start, t[start:stop]) for n, t in WHOLE.items() if t.ndim and start < len(t) and start < stop}
        files.append(held | ({} if start else {"count": (0, WHOLE["count"])}))
        start = stop
    return files


def write(folder: Path, cuts: tuple[int, ...]) -> Path:
    held = pieces(cuts)

    def others(new: Path) -> dict:
        said = {}
        for n, tensors in enumerate(held):
            starts = {name: (start, t.ndim) for name, (start, t) in tensors.items()}
            name = f"model-{n + 1:05d}-of-{len(held):05d}"
            said |= write_part(new, name, {name: t for name, (_, t) in tensors.items()}, header(starts))
        return said

    write_folder(folder / "m", {"memory": {"h": torch.ones(2)}}, {}, others=others)
    return folder / "m"


@pytest.mark.parametrize("cuts", [(), (4,), (1, 2, 6), (3, 8)])
def test_split_parts_are_put_together(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    path = write(tmp_path, cuts)
    assert faults(path) == [] and parts_of(read_meta(path)) == ["memory", "model"]
    part = open_part(path, "model")
    assert len(part) == len(WHOLE) == len(read_part(path, "model"))
    for name, t in WHOLE.items():
        assert part.shape(name) == t.shape and part[name].dtype == t.dtype and torch.equal(part[name], t)
    for start in range(8):
        for stop in range(start, 8):
            assert torch.equal(part.rows("w", start, stop), WHOLE["w"][start:stop])
            assert torch.equal(part.rows("one row", start, stop), WHOLE["one row"][start:stop])


def test_part_in_one_file_is_read_by_rows(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", {"model": WHOLE}, {})
    part = open_part(tmp_path / "m", "model")
    assert torch.equal(part.rows("w", 2, 5), WHOLE["w"][2:5]) and torch.equal(part["count"], WHOLE["count"])
    assert part.rows("w", 7, 7).shape == (0, 3)


@pytest.mark.parametrize("missing", [0, 1])
def test_rows_that_are_missing(tmp_path: Path, missing: int) -> None:
    path = write(tmp_path, (1, 4))
    files = sorted(path.glob("model-*"))
    del files[missing]
    with pytest.raises(
        ValueError, match=r"of-00003.safetensors does not have the rows of .* from \d on; the part is incomplete"
    ):
        Part(files)


@pytest.mark.parametrize("said", ["{", "[]", '{"v": {}}', '{"w": 3}', '{"w": {"saved_offsets": "x"}}'])
def test_headers_without_rows_are_refused(tmp_path: Path, said: str) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(2)}, file, {HEADER: said})
    if said == "[]":  # as if it had none
        assert len(Part([file])) == 1
        return
    with pytest.raises(ValueError, match=r"model.safetensors does not list its rows; the file is damaged$"):
        Part([file])


def test_rows_of_another_place(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for start in (-1, 1):
        save_file({"w": torch.zeros(2)}, file, {HEADER: json.dumps({"w": {"saved_offsets": [start]}})})
        with pytest.raises(ValueError, match=r"does not have the rows of w from 0 on; the part is incomplete$"):
            Part([file])
