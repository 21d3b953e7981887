"""A stack that runs a long text segment by segment, with a memory for each layer.

Shapes: B batch, T tokens of a segment, M remembered tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.memory import ByHead, HiddenStates, LayerMemory, MemoryShape, State
from spanformer.memory.segment import memory_length
from spanformer.model.stack import TransformerStack

NO_DOCUMENT = -1  # the id of tokens read before documents were numbered


class SegmentStack(TransformerStack):
    def run_segment(
        self, h: Tensor, state: State, documents: Tensor | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, State, Tensor]:
        """Embedded tokens h [B, T, dim] after those of the state → the last block's output, the next state, a term of
        the loss. documents and padding [B, T] as in `LM.forward`."""
        past = max(state.tokens())
        documents = _beside("documents", state.documents, documents, h, past, NO_DOCUMENT)
        padding = _beside("padding", state.padding, padding, h, past, False)
        lengths, seen = self.memory_lengths(), state.seen
        memories = self._memories(state, lengths, h.dtype)
        view = View(documents=documents, padding=padding, start=seen)
        at = self.positions_from(seen, h, state.offset)
        out, penalty = self.run_blocks(h, memories, view, lambda position, h: position.embed(h, at))
        longest = max(lengths)
        ids = _last(documents, longest), _last(padding, longest)
        after = State(tuple(memories), seen + h.shape[1], *ids, state.offset)
        return out, after, penalty

    def remember(self, state: State, new: Sequence[Tensor], documents: Tensor) -> State:
        """The state after T more tokens whose states [layers][B, T, dim] are known, as `run_segment` returns it."""
        past, lengths = max(state.tokens()), self.memory_lengths()
        documents_of_all = _beside("documents", state.documents, documents, new[0], past, NO_DOCUMENT)
        memories = self._memories(state, lengths, new[0].dtype)
        kept = tuple(memory.keep(states) for memory, states in zip(memories, new, strict=True))
        return State(kept, state.seen + documents.shape[1], _last(documents_of_all, max(lengths)))

    def start(self, batch: int) -> State:
        """The initial state of a text: empty, or zeros that heads can see, as in the paper's code."""
        weight = next(self.blocks.parameters())
        dtype, dim = weight.dtype, self.config.dim
        lengths = [n if self.config.paper_compat else 0 for n in self.memory_lengths()]
        shape = MemoryShape(batch, self.config.groups, self.config.head_dim, dtype=dtype, device=weight.device)

        def empty(n: int) -> Callable[[Attention, MemoryShape], HiddenStates]:
            return lambda mechanism, shape: HiddenStates(torch.zeros(batch, n, dim, dtype=dtype, device=weight.device))

        each = zip(self.layers(), lengths, strict=True)
        layers = tuple(block.new_memory(shape, empty(n)) for block, n in each)
        return State(layers, offset=self.draw_offsets(batch, weight.device))

    def _memories(self, state: State, lengths: list[int], dtype: torch.dtype) -> list[LayerMemory]:
        """Each layer's memory for the next segment."""
        each = zip(state.layers, lengths, strict=True)
        return [self._ready(memory, keep, n, dtype) for n, (memory, keep) in enumerate(each)]

    def _ready(self, memory: LayerMemory, keep: int, layer: int, dtype: torch.dtype) -> LayerMemory:
        if isinstance(memory, ByHead):
            return memory.change(lambda part: self._ready(part, keep, layer, dtype))
        if not isinstance(memory, HiddenStates):
            return memory
        states = memory.states
        # a span has outgrown its memory: fill with zeros, as at the start
        if self.config.paper_compat and states.shape[1] < keep:
            states = F.pad(states, (0, 0, keep - states.shape[1], 0))
        return HiddenStates(states.to(dtype), memory.tape, length=keep, layer=layer)

    def memory_lengths(self) -> list[int]:
        """[layers] how many earlier states each layer keeps now."""
        return [memory_length(each) for each in self.context_length()]


def _beside(name: str, old: Tensor | None, new: Tensor | None, h: Tensor, past: int, unknown: int) -> Tensor | None:
    """[B, M + T]: the values of earlier segments, followed by the ones of this segment."""
    if new is None:
        if old is not None:
            raise ValueError(f"{name} was given with earlier segments and is missing now; expected [B, T] with each")
        return None
    if new.shape != h.shape[:2]:
        raise ValueError(f"{name} has shape {list(new.shape)}; expected {list(h.shape[:2])}, as x has")
    if old is None:
        old = torch.full((h.shape[0], past), unknown, dtype=new.dtype, device=new.device)
    return torch.cat([old, new], 1)


def _last(ids: Tensor | None, length: int) -> Tensor | None:
    return None if ids is None else ids[:, max(0, ids.shape[1] - length) :]
