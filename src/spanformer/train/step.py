"""One optimiser step: the batch through the model in pieces, backward, clipping, update.

Shapes: B lanes of this process, T tokens of a segment.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spanformer.model.lm import LM, State
from spanformer.train.world import World, reduce_spans


class Losses(NamedTuple):
    """Means over the batch of this process, on its device: nobody waited for them yet."""

    loss: Tensor
    """nats per token, without the penalty"""
    penalty: Tensor


def backward(
    engine: nn.Module, model: LM, world: World, x: Tensor, y: Tensor, state: State | None, *, micro: int, dtype: str
) -> tuple[Losses, State]:
    """Gradients of the mean loss over x, y [B, T], read in `micro` pieces of rows; the state after them."""
    rows = x.shape[0] // micro
    losses, penalties, states = [], [], []
    for n in range(micro):
        some = slice(n * rows, (n + 1) * rows)
        last = n == micro - 1
        with _sync_only(engine, last), autocast(dtype, world.device):
            found = engine(x[some], None if state is None else state.rows(some), targets=y[some])
            loss = found.nll.mean()
            ((loss + found.penalty) / micro).backward()
        losses.append(loss.detach())
        penalties.append(found.penalty.detach())
        states.append(found.state)
    reduce_spans(model, world)
    return Losses(torch.stack(losses).mean(), torch.stack(penalties).mean()), State.stack(states)


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager:
    if dtype == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, getattr(torch, dtype))


@contextlib.contextmanager
def _sync_only(engine: nn.Module, last: bool):
    """Exchange gradients between processes with the last piece only."""
    if isinstance(engine, nn.parallel.DistributedDataParallel) and not last:
        with engine.no_sync():
            yield
    else:
        if hasattr(engine, "set_requires_gradient_sync"):  # FSDP2's module
            engine.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        yield
