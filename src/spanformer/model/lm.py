"""The language model: embedding, blocks, output. Reads a long text segment by segment.

Shapes: B batch, T tokens of a segment, M remembered tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import View
from spanformer.memory import Cache, State
from spanformer.memory.segment import memory_length, remember
from spanformer.model.config import ModelConfig
from spanformer.model.decoder import Decoder
from spanformer.model.reading import make_cache

NO_DOCUMENT = -1  # the id of tokens read before documents were numbered


class LMOutput(NamedTuple):
    logits: Tensor | None
    """[B, T, V], unless targets were given"""
    nll: Tensor | None
    """[B, T] negative log-likelihood in nats of each target, if given"""
    state: State
    """to be passed with the next segment"""
    penalty: Tensor
    """a scalar to add to the mean loss: the price of spans, of unbalanced experts"""


class LM(Decoder):
    """A causal language model whose heads learn how far to look.

    `lm(x)` reads a segment [B, T] of token ids, `lm(x, state)` continues where the state's segment ended.
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
        """x [B, T] ids; targets [B, T] ids: then only their losses are computed, and no logits kept.

        documents [B, T]: ids of packed documents, which do not see each other; numbers must not come back in later
        segments of the same stream. padding [B, T] bool: True where x is no token; nothing sees it.
        """
        self._check(x, targets)
        state = self.start(x.shape[0]) if state is None else state
        past = max(h.shape[1] for h in state.hidden)
        documents = _beside("documents", state.documents, documents, x, past, NO_DOCUMENT)
        padding = _beside("padding", state.padding, padding, x, past, False)
        h = self.dropout(self.place(0, self.embedding(x), state.seen))
        lengths = self.memory_lengths()
        memories, penalty = [], h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        tapes = state.tapes or (None,) * len(lengths)
        layers = zip(self.blocks, self.positions(), state.hidden, lengths, tapes, strict=True)
        for n, (block, position, past, keep, tape) in enumerate(layers):
            h = self.place(n, h, state.seen) if n else h
            if self.config.original and past.shape[1] < keep:  # a span outgrew its memory: zeros, as at the start
                past = F.pad(past, (0, 0, keep - past.shape[1], 0))
            keys = past.shape[1] + x.shape[1]
            start = state.seen - past.shape[1]  # below 0 where zeros stand before the text
            view = View(documents=_last(documents, keys), padding=_last(padding, keys), start=start)
            past = past.to(h.dtype)
            h, new, added = self.through(block, h, past, view, position)
            memories.append(remember(past, new, keep, tape, n))
            penalty = penalty if added is None else penalty + added
        h = self.dropout(self.norm(h))
        longest = max(lengths)
        hidden, tapes = zip(*memories, strict=True)
        seen = state.seen + x.shape[1]
        state = State(hidden, seen, _last(documents, longest), _last(padding, longest), tapes)
        if targets is None:
            return LMOutput(self.head.logits(h), None, state, penalty)
        return LMOutput(None, self.head.nll(h, targets), state, penalty)

    def cache(self, batch: int, *, slack: int = 0, bits: Literal[0, 8] = 0) -> Cache:
        """Room for what the heads see of `batch` texts that are read by `read`: for each key/value head as many keys
        and values as it reaches, however long the texts are. slack: how many tokens `Cache.crop` can always take back.
        bits: 8 stores them in 8 bits, each number off by at most 1/254 of the largest of its vector; 0: in the
        model's own dtype."""
        return make_cache(self, batch, slack, bits)

    def start(self, batch: int) -> State:
        """The memory of a text that begins: empty, or zeros that are attended to, as in the paper's code."""
        weight = next(self.blocks.parameters())
        dtype, dim = weight.dtype, self.config.dim
        lengths = [n if self.config.original else 0 for n in self.memory_lengths()]
        return State(tuple(torch.zeros(batch, n, dim, dtype=dtype, device=weight.device) for n in lengths))

    def memory_lengths(self) -> list[int]:
        """[layers] how many earlier states each layer keeps now."""
        return [memory_length(each) for each in self.lookback()]

    def _check(self, x: Tensor, targets: Tensor | None) -> None:
        if x.ndim != 2 or x.is_floating_point() or not x.numel():
            raise ValueError(
                f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T], B and T at least 1"
            )
        if targets is not None and targets.shape != x.shape:
            raise ValueError(f"targets has shape {list(targets.shape)}; expected that of x, {list(x.shape)}")


def _beside(name: str, old: Tensor | None, new: Tensor | None, x: Tensor, past: int, unknown: int) -> Tensor | None:
    """[B, M + T]: what was kept of earlier segments beside what is given for this one."""
    if new is None:
        if old is not None:
            raise ValueError(f"{name} was given with earlier segments and is missing now; expected [B, T] with each")
        return None
    if new.shape != x.shape:
        raise ValueError(f"{name} has shape {list(new.shape)}; expected that of x, {list(x.shape)}")
    if old is None:
        old = torch.full((x.shape[0], past), unknown, dtype=new.dtype, device=new.device)
    return torch.cat([old, new], 1)


def _last(ids: Tensor | None, length: int) -> Tensor | None:
    return None if ids is None else ids[:, max(0, ids.shape[1] - length) :]
