"""Tensors sharded by rows over processes: gathered, written by all processes, read by any number of them.

FSDP2 shards rows as `torch.chunk` does: the first process has the first ⌈n / processes⌉ rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spanformer.model.folder import Files, write_part
from spanformer.model.part import Part, header
from spanformer.train.distributed import World


class Held(NamedTuple):
    """The rows of a tensor that this process holds."""

    rows: Tensor
    start: int
    """index of the first row"""


def held(t: DTensor, world: World) -> Held:
    return Held(t.to_local(), min(world.rank * -(-len(t) // world.size), len(t)))


def own(tensors: Mapping[str, Tensor], world: World) -> dict[str, Held]:
    """The rows that this process writes: its shard, or for an unsharded tensor all rows in the first process."""
    rows = {name: held(t, world) for name, t in tensors.items() if isinstance(t, DTensor)}
    if world.first:
        rows |= {name: Held(t, 0) for name, t in tensors.items() if not isinstance(t, DTensor)}
    return {name: h for name, h in rows.items() if h.rows.shape[:1] != (0,)}


def whole(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The gathered tensors, in the first process; every process must call it."""
    found = {}
    for name, t in tensors.items():
        full = t.full_tensor() if isinstance(t, DTensor) else t
        if world.first:
            found[name] = full
    return found


def read_like(part: Part, name: str, like: Tensor, world: World) -> Tensor:
    """Read a saved tensor, sharded like `like` if the shapes agree; then only this process's rows are read."""
    if not isinstance(like, DTensor) or part.shape(name) != like.shape:
        return part[name].to(world.device)
    mine = held(like, world)
    rows = part.rows(name, mine.start, mine.start + len(mine.rows)).to(world.device)
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def write_shards(folder: Path | None, parts: Mapping[str, Mapping[str, Held]], world: World) -> Files:
    """Every process writes one file per part into the first process's folder; the first gets the list of files."""
    folder = Path(world.broadcast(str(folder)))
    said = []
    for part, tensors in parts.items():
        starts = {name: (t.start, t.rows.ndim) for name, t in tensors.items()}
        rows = {name: t.rows for name, t in tensors.items()}
        (entry,) = write_part(folder, _file(part, world.rank, world.size), rows, header(starts)).values()
        said.append([int(entry["size"]), *bytes.fromhex(str(entry["sha256"]))])
    every = world.gather_rows(torch.tensor(said, device=world.device))
    if every is None:
        return {}
    files = [_file(part, rank, world.size) + ".safetensors" for rank in range(world.size) for part in parts]
    return {
        file: {"size": size, "sha256": bytes(digest).hex()}
        for file, (size, *digest) in zip(files, every.tolist(), strict=True)
    }


def _file(part: str, rank: int, size: int) -> str:
    return f"{part}-{rank + 1:05d}-of-{size:05d}"
