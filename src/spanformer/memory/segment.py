"""Segment recurrence: each layer keeps the hidden states of earlier tokens, so that a long text can run in pieces.

Transformer-XL (Dai et al., 2019), https://arxiv.org/abs/1901.02860

    k, v = projections of [stop_gradient(memory), x]        memory ← the last M of [memory, x]

M follows what the layer's heads can see, rounded up to blocks, so it shrinks and grows with their spans.
Shapes: B batch, M remembered tokens, T new tokens, dim of hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # memory lengths are multiples of this: fewer shapes, and spare room for spans that grow
ALIGNED = 64  # bytes; products may round otherwise on rows that lie otherwise, and a resumed run must not

SEGMENTS = 4  # room on a tape, at most half of what it remembers: so often is it copied to a new one


class Tape:
    """Room behind what a layer remembers: new states are written after the old, which stay where they are.

    So a long memory is neither copied in every segment nor held twice, once for the backward pass and once for the
    next segment. Only unused room is written: a state that is continued a second time gets a tape of its own.
    """

    def __init__(self, past: Tensor, x: Tensor, more: int) -> None:
        """more: room for this many further states."""
        b, old, dim = past.shape
        room = old + x.shape[1] + more
        self.states = torch.empty(b, room, dim, dtype=x.dtype, device=x.device)
        self.states[:, :old] = past
        self.end = old
        self.append(x)

    def continues(self, past: Tensor, x: Tensor) -> bool:
        """Whether past ends where this tape does, and x still fits."""
        mine = self.states
        return (
            past.data_ptr() == self._view(self.end - past.shape[1]).data_ptr()
            and past.stride() == mine.stride()
            and past.dtype == x.dtype
            and self.end + x.shape[1] <= mine.shape[1]
        )

    def append(self, x: Tensor) -> None:
        self.states[:, self.end : self.end + x.shape[1]] = x
        self.end += x.shape[1]

    def last(self, length: int) -> Tensor:
        """[B, length, dim], not to be written to."""
        return self._view(self.end - length)

    def _view(self, start: int) -> Tensor:
        # .data: autograd takes a tensor it has saved as changed when anything on the tape is written
        return self.states.data[:, start : self.end]


def memory_length(context: list[int]) -> int:
    """How many states a layer keeps for heads of these context lengths: whole blocks, and one to spare for spans that
    grow."""
    longest = max(context)
    return (longest // BLOCK + 2) * BLOCK if longest else 0


@torch.no_grad()
def remember(
    past: Tensor, x: Tensor, length: int, tape: Tape | None = None, layer: int = 0
) -> tuple[Tensor, Tape | None]:
    """The last `length` of past [B, M, dim] and x [B, T, dim], detached, and the tape they lie on; `tape`: past's.

    A full tape is copied to a new one, and the backward pass holds the old one meanwhile. So first tapes have room for
    a different number of segments from layer to layer: never are all layers' memories there twice.
    """
    new = x.shape[1]
    if length <= new:
        return x[:, new - length :].detach(), None
    old = past[:, max(0, past.shape[1] - (length - new)) :]
    if x.shape[-1] * x.element_size() % ALIGNED:
        return torch.cat([old, x], 1), None
    if tape is not None and tape.continues(past, x):
        tape.append(x)
    else:
        segments = min(SEGMENTS, max(1, old.shape[1] // (2 * new)))
        tape = Tape(old, x, new * (segments if tape is not None else layer % (segments + 1)))
    return tape.last(old.shape[1] + new), tape
