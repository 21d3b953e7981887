"""A part of a saved folder: tensors by name, in one file or split over several, NAME-00002-of-00004.safetensors.

A file of a split part holds some rows of some of the tensors. Its header lists which rows, in the format of
torch.distributed.checkpoint, whose HuggingFaceStorageReader therefore reads split parts too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

HEADER, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class Rows(NamedTuple):
    """The rows of a tensor in one file."""

    file: Path
    start: int
    shape: list[int]

    @property
    def stop(self) -> int:
        return self.start + (self.shape[0] if self.shape else 1)


class Part(Mapping[str, Tensor]):
    """Reads tensors on demand: `part[name]` is a whole tensor, `part.rows(name, start, stop)` a few rows of one.

    It reads all headers first, and raises a ValueError if they do not fit together.
    """

    def __init__(self, files: list[Path]) -> None:
        self._held: dict[str, list[Rows]] = {}
        for file in files:
            for name, rows in _row_ranges(file):
                self._held.setdefault(name, []).append(rows)
        for name, held in self._held.items():
            held.sort(key=lambda rows: (rows.start, rows.stop))
            _check_whole(name, held)

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, self._held[name][-1].stop)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def shape(self, name: str) -> torch.Size:
        """The shape of the whole tensor."""
        last = self._held[name][-1]
        return torch.Size([last.stop, *last.shape[1:]] if last.shape else [])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start … stop − 1; only the files that hold some of them are read."""
        held = [rows for rows in self._held[name] if start < rows.stop and rows.start < stop]
        found = [_read(rows, name, start, stop) for rows in held or self._held[name][:1]]
        return torch.cat(found) if len(found) > 1 else found[0]


def header(starts: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The header of a split part's file: name → (first row, dimensions)."""
    said = {name: {OFFSETS: [start, *[0] * (ndim - 1)][:ndim]} for name, (start, ndim) in starts.items()}
    return {HEADER: json.dumps(said)}


def _row_ranges(file: Path) -> Iterator[tuple[str, Rows]]:
    """The tensors in a file, with their rows."""
    try:
        with safe_open(file, "pt") as opened:
            said = json.loads((opened.metadata() or {}).get(HEADER, "{}"))
            for name in opened.keys():  # noqa: SIM118, it is not a dict
                offsets = said[name][OFFSETS] if said else []
                yield name, Rows(file, int(sum(offsets)), opened.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({reason(error)}); the file is damaged") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} does not list its rows; the file is damaged") from None


def _check_whole(name: str, held: list[Rows]) -> None:
    end = 0
    for rows in held:
        if rows.start != end or rows.shape[1:] != held[0].shape[1:]:
            raise ValueError(f"{rows.file} does not have the rows of {name} from {end} on; the part is incomplete")
        end = rows.stop


def _read(rows: Rows, name: str, start: int, stop: int) -> Tensor:
    low, high = max(start, rows.start) - rows.start, min(stop, rows.stop) - rows.start
    with safe_open(rows.file, "pt") as opened:
        if not rows.shape:
            return opened.get_tensor(name)
        return opened.get_slice(name)[low:high] if low < high else opened.get_slice(name)[0:0]


def reason(error: BaseException) -> str:
    """The error in a few words; safetensors wraps the system's message."""
    said = re.search(r"I/O error: (.*) \(os error \d+\)", str(error))
    return said[1] if said else (isinstance(error, OSError) and error.strerror) or str(error)
