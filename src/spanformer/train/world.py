"""The processes a run is made of, through PyTorch's own engines. One process is a world of its own.

    torchrun --nproc-per-node 2 -m spanformer train runs/demo.toml

Each process reads its share of the lanes. DDP averages gradients; FSDP2 (`fully_shard`) also shards parameters,
gradients and optimiser state.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from spanformer.model.layered import Layered

LONGEST_WAIT = timedelta(hours=2)  # for the first process, which may be preparing a corpus
LONGEST_TEXT = 4096  # bytes, as of a path
UNTIL_ENDED = 5.0  # seconds within which torchrun ends all processes when one has failed

_meetings = itertools.count()


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    engine: Literal["one", "ddp", "fsdp"]

    @property
    def first(self) -> bool:
        """This process writes files and shows progress."""
        return self.rank == 0

    def rows(self, lanes: int) -> slice:
        """The lanes this process reads."""
        if lanes % self.size:
            raise ValueError(f"train.batch is {lanes}; expected a multiple of the number of processes, {self.size}")
        share = lanes // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def gather_rows(self, rows: Tensor) -> Tensor | None:
        """Rows [B, …] of all processes, one below the other, on the first; None elsewhere."""
        if self.size == 1:
            return rows
        into = [torch.empty_like(rows) for _ in range(self.size)] if self.first else None
        dist.gather(rows.contiguous(), into)
        return None if into is None else torch.cat(into)

    def told(self, text: str) -> str:
        """The first process's text, in every process."""
        if self.size == 1:
            return text
        sent = torch.zeros(LONGEST_TEXT, dtype=torch.uint8)
        if self.first:
            content = bytearray(text.encode()[:LONGEST_TEXT])
            sent[: len(content)] = torch.tensor(content, dtype=torch.uint8)
        sent = sent.to(self.device)
        dist.broadcast(sent, 0)
        return bytes(sent.tolist()).rstrip(b"\0").decode()

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextlib.contextmanager
def join_world(device: str, engine: str) -> Iterator[World]:
    """The world that torchrun's environment names, or one process alone."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    where = _device(device, local)
    if size == 1:
        if engine == "fsdp":
            raise ValueError("train.engine is fsdp with one process; start it by torchrun, or leave engine at auto")
        yield World(0, 1, where, "one")
        return
    _meet("nccl" if where.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, where, "fsdp" if engine == "fsdp" else "ddp")
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        time.sleep(UNTIL_ENDED)  # the process that failed says why, and torchrun then ends this one
        raise ConnectionError(f"process {dist.get_rank()} lost the others; one of them must have failed") from error
    # DDP must not be the last to hold the group: it would end the group's threads while it holds Python's lock, for
    # which one of them may be waiting to let go of a tensor.
    gc.collect()
    dist.destroy_process_group()  # not after an error, when the others may not be there to take part


def _meet(backend: str) -> None:
    """Make the process group. torchrun keeps what processes tell each other about their addresses when it starts them
    again, and when a process makes one group after another: each meeting therefore has a name of its own."""
    store, rank, size = next(rendezvous("env://", timeout=LONGEST_WAIT))
    name = f"spanformer {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {next(_meetings)}"
    store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)


def _device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"train.device is {name}, and PyTorch finds no GPU here; expected cpu or auto")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"train.device is {name!r}, which PyTorch cannot use here; expected cpu or auto") from None
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def wrap(model: Layered, world: World) -> nn.Module:
    """The model as the engine runs it. Its parameters are then the optimiser's: call this before making one.

    Both engines count on a gradient of every parameter in every process, be it of zeros: see Experts and Clusters.
    """
    if world.engine == "one":
        return model
    if world.engine == "fsdp":
        return shard(model, world)
    on = [world.device] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=on)


def shard(model: Layered, world: World) -> Layered:
    """FSDP2: every block a unit of its own. Spans stay whole in every process, since memory lengths depend on them;
    `reduce_spans` averages their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # what a model returns is never written to, but its losses are a view
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = set(span_parameters(model))
    for block in model.layers():
        fully_shard(block, mesh=mesh, ignored_params={p for p in block.parameters() if p in whole})
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model


def span_parameters(model: Layered) -> list[nn.Parameter]:
    return [m.ratio for m in model.spans_modules()]


def reduce_spans(model: Layered, world: World) -> None:
    """Average the gradients of what fully_shard leaves alone."""
    if world.engine != "fsdp":
        return
    grads = [p.grad for p in span_parameters(model) if p.grad is not None]
    if grads:
        flat = world.mean(torch.cat([g.flatten() for g in grads]))
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
