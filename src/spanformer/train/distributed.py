"""The processes of a run, through PyTorch's own engines. A single process is a world of size 1.

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

from spanformer.model.stack import TransformerStack

LONGEST_WAIT = timedelta(hours=2)  # for the first process, which may have to prepare a corpus
LONGEST_TEXT = 4096  # bytes; enough for a path
UNTIL_ENDED = 5.0  # seconds in which torchrun ends all processes after one has failed

_meetings = itertools.count()


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    engine: Literal["one", "ddp", "fsdp"]

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    def rows(self, lanes: int) -> slice:
        """The lanes of this process."""
        if lanes % self.size:
            raise ValueError(f"train.batch is {lanes}; expected a multiple of the number of processes, {self.size}")
        share = lanes // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def mean(self, values: Tensor) -> Tensor:
        """Average over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def gather_rows(self, rows: Tensor) -> Tensor | None:
        """The rows [B, …] of all processes, concatenated, on the first process; None on the others."""
        if self.size == 1:
            return rows
        into = [torch.empty_like(rows) for _ in range(self.size)] if self.first else None
        dist.gather(rows.contiguous(), into)
        return None if into is None else torch.cat(into)

    def broadcast(self, text: str) -> str:
        """Return the first process's text in every process."""
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
    """The world described by torchrun's environment variables, or a single process."""
    size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    where = _device(device, local)
    if size == 1:
        if engine == "fsdp":
            raise ValueError("train.engine is fsdp with one process; start the run with torchrun, or use engine auto")
        yield World(0, 1, where, "one")
        return
    _meet("nccl" if where.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), size, where, "fsdp" if engine == "fsdp" else "ddp")
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        time.sleep(UNTIL_ENDED)  # the failed process prints the reason, then torchrun ends this one
        raise ConnectionError(f"process {dist.get_rank()} lost the others; one of them must have failed") from error
    # DDP must not hold the last reference to the group: it would join the group's threads while it holds the GIL, for
    # which one of them may be waiting to free a tensor.
    gc.collect()
    dist.destroy_process_group()  # not after an error: the other processes may be gone


def _meet(backend: str) -> None:
    """Create the process group. torchrun's store keeps the addresses of earlier groups after a restart, and when a
    process creates several groups, so each group uses its own prefix."""
    store, rank, size = next(rendezvous("env://", timeout=LONGEST_WAIT))
    name = f"spanformer {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} {next(_meetings)}"
    store = dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LONGEST_WAIT)


def _device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"train.device is {name}, but PyTorch finds no GPU; expected cpu or auto")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"train.device is {name!r}, which PyTorch cannot use here; expected cpu or auto") from None
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    return device


def wrap(model: TransformerStack, world: World) -> nn.Module:
    """The model wrapped for the engine. Call this before building the optimiser, which needs the wrapped parameters.

    Both engines need a gradient for every parameter in every process, even a zero one: see Experts and Clusters.
    """
    if world.engine == "one":
        return model
    if world.engine == "fsdp":
        return shard(model, world)
    on = [world.device] if world.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=on)


def shard(model: TransformerStack, world: World) -> TransformerStack:
    """FSDP2 with one unit per block. Spans stay unsharded in every process, since memory lengths depend on them;
    `reduce_spans` averages their gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    refuse_shared(model)
    # the losses a model returns are a view, which nothing writes to
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(world.device.type, (world.size,))
    whole = set(span_parameters(model))
    for block in model.layers():
        fully_shard(block, mesh=mesh, ignored_params={p for p in block.parameters() if p in whole})
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model


def refuse_shared(model: TransformerStack) -> None:
    """A parameter of two blocks would belong to two units."""
    owner: dict[nn.Parameter, str] = {}
    for number, block in enumerate(model.layers()):
        for name, parameter in block.named_parameters():
            if parameter in owner:
                raise ValueError(
                    f"layer {number} shares {name} with {owner[parameter]}, and train.engine fsdp shards each layer "
                    "apart; use engine ddp, or for linformer share key_value in the place of layerwise"
                )
        owner |= {parameter: f"layer {number}" for parameter in block.parameters()}


def span_parameters(model: TransformerStack) -> list[nn.Parameter]:
    return [m.ratio for m in model.spans_modules()]


def reduce_spans(model: TransformerStack, world: World) -> None:
    """Average the gradients of the parameters that fully_shard ignores."""
    if world.engine != "fsdp":
        return
    grads = [p.grad for p in span_parameters(model) if p.grad is not None]
    if grads:
        flat = world.mean(torch.cat([g.flatten() for g in grads]))
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))
