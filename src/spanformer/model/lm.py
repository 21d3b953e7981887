"""The language model: embedding, blocks, output. It runs a long text segment by segment.

Shapes: B batch, T tokens of a segment, M remembered tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from spanformer.depth import Exits, Targets
from spanformer.memory import Cache, State
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.decoding import make_cache
from spanformer.model.neighbours import Finder, NeighbourGate
from spanformer.model.segments import SegmentStack
from spanformer.ops.decode.codes import Bits


class LMOutput(NamedTuple):
    logits: Tensor | None
    """[B, T, V], unless targets were given"""
    nll: Tensor | None
    """[B, T] negative log-likelihood in nats of each target, if given"""
    state: State
    """pass it with the next segment"""
    penalty: Tensor
    """a scalar to add to the mean loss: penalties for spans and for unbalanced experts"""


class LM(SegmentStack, Decoder):
    """A causal language model.

    `lm(x)` runs a segment [B, T] of token ids, `lm(x, state)` continues where the state's segment ended.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, "lm")
        self.gate = NeighbourGate(config.dim) if config.neighbours else None
        """of a model with neighbours (SPALM)"""
        self.finder: Finder | None = None
        """finds neighbours that are not given"""

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        padding: Tensor | None = None,
        neighbours: Tensor | None = None,
    ) -> LMOutput:
        """x [B, T] ids; targets [B, T] ids: if given, only their losses are computed, and no logits are kept.

        documents [B, T]: ids of packed documents, which do not see each other; an id must not occur again in later
        segments of the same stream. padding [B, T] bool: True for padding, which no token sees.
        neighbours [B, T, k]: for a model that has a gate for them, tokens that followed similar contexts, −1 for none.
        """
        self._check(x, targets)
        state = self.start(x.shape[0]) if state is None else state
        beside = state.beside
        h, state, penalty = self.run_segment(self.embedding(x), state, documents, padding)
        h = self._normed(h)
        if self.gate is not None:
            if neighbours is None:
                neighbours, beside = self.find().read(x, beside)
                state = replace(state, beside=beside)
            h = self.gate.mix(h, neighbours, self.embedding)
        elif neighbours is not None:
            raise ValueError("neighbours are given, and model.neighbours is 0; expected none")
        h = self.dropout(h)
        if targets is None:
            return LMOutput(self.head.logits(h), None, state, penalty)
        nll = self.head.nll(h, targets)
        if isinstance(self.depth, Exits):
            penalty = penalty + self.depth.loss(nll, Targets(partial(self._nll, targets), self.predict, targets))
        return LMOutput(None, nll, state, penalty)

    def _normed(self, h: Tensor) -> Tensor:
        """The last norm of the stack's output h [B, T, dim], each token read by the exit it left at."""
        return self.norm(self.depth.read_all(h) if isinstance(self.depth, Exits) else h)

    def _nll(self, targets: Tensor, states: Tensor) -> Tensor:
        """[B, T] of an exit's states [B, T, dim]."""
        return self.head.nll(self.dropout(self.norm(states)), targets)

    def cache(self, batch: int, *, slack: int = 0, bits: Bits = 0) -> Cache:
        """An empty KV cache for `batch` texts that `decode` continues: each key/value head stores as many keys and
        values as it reaches, however long the texts are. slack: how many tokens `Cache.crop` can always remove.
        bits: 8 stores them in 8 bits, with an error of at most 1/254 of the largest number of a vector; 4: in 4 bits,
        see docs/cache.md; 0: in the model's dtype."""
        cache = make_cache(self, batch, slack, bits)
        cache.beside = None if self.gate is None else self.find().cache(batch, slack)
        return cache

    def find(self) -> Finder:
        """What finds neighbours that are not given."""
        if self.finder is None:
            raise ValueError(
                f"the model mixes in {self.config.neighbours} neighbours of each token, and nothing finds them; pass "
                "`neighbours`, or run it inside spanformer.retrieve.spalm.finding()"
            )
        return self.finder

    def output_states(self, h: Tensor, x: Tensor, cache: Cache, lengths: Tensor | None) -> Tensor:
        h = self._normed(h)
        if self.gate is None:
            return h
        assert cache.beside is not None
        return self.gate.mix(h, self.find().decode(x, cache.beside, lengths), self.embedding)

    def receptive_field(self) -> int:
        own = super().receptive_field()
        return own if self.gate is None else max(own, self.find().receptive_field())

    def exits(self) -> Exits:
        """The exits of a model that has them."""
        if not isinstance(self.depth, Exits):
            raise ValueError("the model has no exits; train one with model.depth.kind 'exits'")
        return self.depth

    def _check(self, x: Tensor, targets: Tensor | None) -> None:
        if x.ndim != 2 or x.is_floating_point() or not x.numel():
            raise ValueError(
                f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], B and T at least 1"
            )
        if targets is not None and targets.shape != x.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected {list(x.shape)}, as x has")
