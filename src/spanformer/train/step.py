"""One optimiser step: the batch through the model in pieces, backward, clipping, update.

Shapes: B lanes or pairs of this process, T tokens.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spanformer.model.layered import Layered
from spanformer.model.lm import State
from spanformer.train.world import World, reduce_spans


class Drawn(NamedTuple):
    """One batch."""

    arguments: dict[str, Tensor]
    """of the model's forward, by name, each with B rows; `targets` among them"""
    tokens: int
    """read in all processes together; of pairs, those of the targets"""
    counted: Tensor | None = None
    """[B, T] bool, False where a target is padding; None: all count"""
    reset: bool = True
    """what a model remembers of the batch before is not what came before this one"""


class Losses(NamedTuple):
    """Means over the batch of this process, on its device: nobody waited for them yet."""

    loss: Tensor
    """nats per token, without the penalty"""
    penalty: Tensor


def backward(
    engine: nn.Module, model: Layered, world: World, drawn: Drawn, state: State | None, *, micro: int, dtype: str
) -> tuple[Losses, State | None]:
    """Gradients of the mean loss over the tokens that count, read in `micro` pieces of rows; the state after them, of a
    model that has one."""
    arguments = {name: t.to(world.device) for name, t in drawn.arguments.items()}
    counted = None if drawn.counted is None else drawn.counted.to(world.device)
    rows = len(arguments["targets"]) // micro
    losses, penalties, states = [], [], []
    for n in range(micro):
        some = slice(n * rows, (n + 1) * rows)
        last = n == micro - 1
        with _sync_only(engine, last), autocast(dtype, world.device):
            before = {} if state is None else {"state": state.rows(some)}
            found = engine(**{name: t[some] for name, t in arguments.items()}, **before)
            # pieces and processes may hold more or fewer tokens than others, and every token counts alike
            share = drawn.tokens / world.size / micro
            loss = found.nll.mean() if counted is None else (found.nll * counted[some]).sum() / share
            ((loss + found.penalty) / micro).backward()
        losses.append(loss.detach())
        penalties.append(found.penalty.detach())
        states.append(getattr(found, "state", None))
    reduce_spans(model, world)
    means = Losses(torch.stack(losses).mean(), torch.stack(penalties).mean())
    return means, None if states[0] is None else State.stack(states)


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
