"""Segment recurrence: each layer keeps the hidden states of earlier tokens, so that a long text can run in pieces.

Transformer-XL (Dai et al., 2019), https://arxiv.org/abs/1901.02860

    k, v = projections of [stop_gradient(memory), x]        memory ← the last M of [memory, x]

M is the context length of the layer's heads, rounded up to blocks, so it shrinks and grows with their spans.
Shapes: B batch, M remembered tokens, T new tokens, dim of hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64  # memory lengths are multiples of this: fewer shapes, and room for spans that grow
ALIGNED = 64  # bytes; alignment can change the rounding of products, which a resumed run must repeat

SEGMENTS = 4  # segments of room on a tape, at most half its memory: a copy to a new tape every 4 segments


class Tape:
    """A buffer with room after a layer's states: new states are written after the old ones, which are not moved.

    So a long memory is neither copied in every segment nor stored twice, once for the backward pass and once for the
    next segment. Only unused room is written: a state that is continued a second time gets a new tape.
    """

    def __init__(self, past: Tensor, x: Tensor, more: int) -> None:
        """more: the number of further states to make room for."""
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
        """[B, length, dim], read-only."""
        return self._view(self.end - length)

    def _view(self, start: int) -> Tensor:
        # .data: otherwise any write to the tape would mark tensors that autograd saved as changed
        return self.states.data[:, start : self.end]


def memory_length(context: list[int]) -> int:
    """How many states a layer keeps for heads of these context lengths: whole blocks, and one more for spans that
    grow."""
    longest = max(context)
    return (longest // BLOCK + 2) * BLOCK if longest else 0


@torch.no_grad()
def remember(
    past: Tensor, x: Tensor, length: int, tape: Tape | None = None, layer: int = 0
) -> tuple[Tensor, Tape | None]:
    """The last `length` of past [B, M, dim] and x [B, T, dim], detached, and their tape; `tape`: that of past.

    A full tape is copied to a new one, while the backward pass still holds the old one. So first tapes have room for
    a different number of segments in each layer, and the layers' memories are never all stored twice at a time.
    """
    new = x.shape[1]
    if length <= new:
        return x.detach() if length == new else x[:, new - length :].clone(), None  # a view would hold on to all of x
    old = past[:, max(0, past.shape[1] - (length - new)) :]
    if x.shape[-1] * x.element_size() % ALIGNED:
        return torch.cat([old, x], 1), None
    if tape is not None and tape.continues(past, x):
        tape.append(x)
    else:
        segments = min(SEGMENTS, max(1, old.shape[1] // (2 * new)))
        tape = Tape(old, x, new * (segments if tape is not None else layer % (segments + 1)))
    return tape.last(old.shape[1] + new), tape
