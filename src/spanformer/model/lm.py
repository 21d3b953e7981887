"""The language model: embedding, blocks, output. It runs a long text segment by segment.

Shapes: B batch, T tokens of a segment, M remembered tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import Attention, View, new_memory
from spanformer.depth import Exits, Targets
from spanformer.memory import ByHead, Cache, HiddenStates, LayerMemory, MemoryShape, State
from spanformer.memory.segment import memory_length
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.decoding import make_cache

NO_DOCUMENT = -1  # the id of tokens read before documents were numbered


class LMOutput(NamedTuple):
    logits: Tensor | None
    """[B, T, V], unless targets were given"""
    nll: Tensor | None
    """[B, T] negative log-likelihood in nats of each target, if given"""
    state: State
    """pass it with the next segment"""
    penalty: Tensor
    """a scalar to add to the mean loss: penalties for spans and for unbalanced experts"""


class LM(Decoder):
    """A causal language model.

    `lm(x)` runs a segment [B, T] of token ids, `lm(x, state)` continues where the state's segment ended.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "lm")

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> LMOutput:
        """x [B, T] ids; targets [B, T] ids: if given, only their losses are computed, and no logits are kept.

        documents [B, T]: ids of packed documents, which do not see each other; an id must not occur again in later
        segments of the same stream. padding [B, T] bool: True for padding, which no token sees.
        """
        self._check(x, targets)
        state = self.start(x.shape[0]) if state is None else state
        past = max(state.tokens())
        documents = _beside("documents", state.documents, documents, x, past, NO_DOCUMENT)
        padding = _beside("padding", state.padding, padding, x, past, False)
        h, lengths, seen = self.embedding(x), self.memory_lengths(), state.seen
        memories = self._memories(state, lengths, h.dtype)
        view = View(documents=documents, padding=padding, start=seen)
        h, penalty = self.run_blocks(h, memories, view, lambda position, h: position.embed(h, seen))
        h, longest = self.dropout(self.norm(h)), max(lengths)
        state = State(tuple(memories), seen + x.shape[1], _last(documents, longest), _last(padding, longest))
        if targets is None:
            return LMOutput(self.head.logits(h), None, state, penalty)
        nll = self.head.nll(h, targets)
        if isinstance(self.depth, Exits):
            penalty = penalty + self.depth.loss(nll, Targets(partial(self._nll, targets), self.predict, targets))
        return LMOutput(None, nll, state, penalty)

    def _nll(self, targets: Tensor, states: Tensor) -> Tensor:
        """[B, T] of an exit's states [B, T, dim]."""
        return self.head.nll(self.dropout(self.norm(states)), targets)

    def cache(self, batch: int, *, slack: int = 0, bits: Literal[0, 8] = 0) -> Cache:
        """An empty KV cache for `batch` texts that `decode` continues: each key/value head stores as many keys and
        values as it reaches, however long the texts are. slack: how many tokens `Cache.crop` can always remove.
        bits: 8 stores them in 8 bits, with an error of at most 1/254 of the largest number of a vector; 0: in the
        model's dtype."""
        return make_cache(self, batch, slack, bits)

    def exits(self) -> Exits:
        """The exits of a model that has them."""
        if not isinstance(self.depth, Exits):
            raise ValueError("the model has no exits; train one with model.depth.kind 'exits'")
        return self.depth

    def start(self, batch: int) -> State:
        """The initial state of a text: empty, or zeros that heads can see, as in the paper's code."""
        weight = next(self.blocks.parameters())
        dtype, dim = weight.dtype, self.config.dim
        lengths = [n if self.config.paper_compat else 0 for n in self.memory_lengths()]
        shape = MemoryShape(batch, self.config.groups, self.config.head_dim, dtype=dtype, device=weight.device)

        def empty(n: int) -> Callable[[Attention, MemoryShape], HiddenStates]:
            return lambda mechanism, shape: HiddenStates(torch.zeros(batch, n, dim, dtype=dtype, device=weight.device))

        each = zip(self.mechanisms(), lengths, strict=True)
        return State(tuple(new_memory(mechanism, shape, empty(n)) for mechanism, n in each))

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

    def _check(self, x: Tensor, targets: Tensor | None) -> None:
        if x.ndim != 2 or x.is_floating_point() or not x.numel():
            raise ValueError(
                f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], B and T at least 1"
            )
        if targets is not None and targets.shape != x.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(x.shape)}, as x has")


def _beside(name: str, old: Tensor | None, new: Tensor | None, x: Tensor, past: int, unknown: int) -> Tensor | None:
    """[B, M + T]: the values of earlier segments, followed by the ones of this segment."""
    if new is None:
        if old is not None:
            raise ValueError(f"{name} was given with earlier segments and is missing now; expected [B, T] with each")
        return None
    if new.shape != x.shape:
        raise ValueError(f"{name} has shape {list(new.shape)}; expected {list(x.shape)}, as x has")
    if old is None:
        old = torch.full((x.shape[0], past), unknown, dtype=new.dtype, device=new.device)
    return torch.cat([old, new], 1)


def _last(ids: Tensor | None, length: int) -> Tensor | None:
    return None if ids is None else ids[:, max(0, ids.shape[1] - length) :]
