"""One optimiser step: the batch through the model in pieces, backward, clipping, update.

Shapes: B lanes or pairs of this process, T tokens.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spanformer.model.lm import State
from spanformer.model.stack import TransformerStack
from spanformer.train.distributed import World, reduce_spans


class Batch(NamedTuple):
    """One batch."""

    arguments: dict[str, Tensor]
    """keyword arguments of the model's forward, including `targets`, each with B rows"""
    tokens: int
    """tokens of the batch over all processes; for pairs, tokens of the targets"""
    counted: Tensor | None = None
    """[B, T] bool, False where a target is padding; None: all count"""
    reset: bool = True
    """whether this batch does not continue the previous one, so that the model's state must be dropped"""
    whole: bool = False
    """whether each row is a text from its beginning to its end, so that no batch has a state"""


class Losses(NamedTuple):
    """Means over the batch of this process, on its device, not synchronised yet."""

    loss: Tensor
    """nats per token, without the penalty"""
    penalty: Tensor


def backward(
    engine: nn.Module,
    model: TransformerStack,
    world: World,
    batch: Batch,
    state: State | None,
    *,
    grad_accum_steps: int,
    dtype: str,
) -> tuple[Losses, State | None]:
    """Accumulate gradients of the mean loss over counted tokens, in `grad_accum_steps` pieces of rows. Also returns the
    next state, for a model that has one."""
    arguments = {name: t.to(world.device) for name, t in batch.arguments.items()}
    counted = None if batch.counted is None else batch.counted.to(world.device)
    rows = len(arguments["targets"]) // grad_accum_steps
    losses, penalties, states = [], [], []
    for n in range(grad_accum_steps):
        some = slice(n * rows, (n + 1) * rows)
        last = n == grad_accum_steps - 1
        with _sync_only(engine, last), autocast(dtype, world.device):
            before = {} if state is None else {"state": state.rows(some)}
            found = engine(**{name: t[some] for name, t in arguments.items()}, **before)
            # pieces and processes may hold different numbers of tokens, and every token has equal weight
            share = batch.tokens / world.size / grad_accum_steps
            loss = found.nll.mean() if counted is None else (found.nll * counted[some]).sum() / share
            weight = torch.full_like(found.nll, 1 / found.nll.numel()) if counted is None else counted[some] / share
            model.learn_from(found.nll, weight / grad_accum_steps)
            ((loss + found.penalty) / grad_accum_steps).backward()
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
    """Exchange gradients between processes after the last piece only."""
    if isinstance(engine, nn.parallel.DistributedDataParallel) and not last:
        with engine.no_sync():
            yield
    else:
        if hasattr(engine, "set_requires_gradient_sync"):  # FSDP2's module
            engine.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]
        yield
