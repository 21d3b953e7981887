"""The language model: embedding, blocks, output. Reads a long text segment by segment.

Shapes: B batch, T tokens of a segment, M remembered tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spanformer.attention import AdaptiveSpan, Attention, DynamicSpan, View, read_spans
from spanformer.memory import Cache, State
from spanformer.memory.segment import memory_length, remember
from spanformer.model.block import Block
from spanformer.model.build import make_block, make_position
from spanformer.model.config import ModelConfig
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head
from spanformer.model.feedforward import FeedForward
from spanformer.model.norm import make_norm
from spanformer.model.reading import Reader, make_cache, read

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


class LM(nn.Module):
    """A causal language model whose heads learn how far to look.

    `lm(x)` reads a segment [B, T] of token ids, `lm(x, state)` continues where the state's segment ended.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if not config.vocab:
            raise ValueError("model.vocab is 0; expected the number of tokens of the data")
        self.config = config
        e = config.embedding
        if e.cutoffs:
            embedding = AdaptiveEmbedding(config.vocab, config.dim, e.cutoffs, e.divisor)
            head = AdaptiveHead(config.vocab, config.dim, e.cutoffs, e.divisor, tied_to=embedding if e.tied else None)
        else:
            embedding = Embedding(config.vocab, config.dim)
            head = Head(config.vocab, config.dim, bias=e.bias, tied_to=embedding if e.tied else None)
            if e.tied:  # as the output's weight, N(0, 1) would begin with far too certain predictions
                nn.init.normal_(embedding.weight, std=config.dim**-0.5)
        self.embedding, self.head = embedding, head
        self.position = make_position(config)
        self.blocks = nn.ModuleList(make_block(config, parts) for parts in config.stack())
        self.norm = make_norm(config.norm, config.dim) if config.order == "pre" else nn.Identity()
        self.dropout = nn.Dropout(e.dropout)
        self.checkpointing = False
        """recompute each block in the backward pass instead of keeping its activations"""
        self._reader: Reader | None = None

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
        h = self.dropout(self.position.embed(self.embedding(x), state.seen))
        lengths = self.memory_lengths()
        memories, penalty = [], h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        tapes = state.tapes or (None,) * len(lengths)
        for n, (block, past, keep, tape) in enumerate(zip(self.blocks, state.hidden, lengths, tapes, strict=True)):
            if self.config.original and past.shape[1] < keep:  # a span outgrew its memory: zeros, as at the start
                past = F.pad(past, (0, 0, keep - past.shape[1], 0))
            keys = past.shape[1] + x.shape[1]
            start = state.seen - past.shape[1]  # below 0 where zeros stand before the text
            view = View(documents=_last(documents, keys), padding=_last(padding, keys), start=start)
            past = past.to(h.dtype)
            arguments = (h, past, view, self.position)
            if self.checkpointing and torch.is_grad_enabled():
                h, new, added = checkpoint(block, *arguments, use_reentrant=False)  # pyright: ignore
            else:
                h, new, added = block(*arguments)
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

    def read(
        self,
        x: Tensor,
        cache: Cache,
        *,
        lengths: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
    ) -> Tensor | None:
        """Read the next tokens x [B, T] of each row of the cache, without gradients and dropout.

        lengths [B]: how many of a row's T tokens are real; the others are padding behind them. Returns the logits of
        all tokens [B, T, V], or of each row's last real token [B, V] (of a row without any, they mean nothing), or
        None. They are those of `lm(x)` over the whole text so far.
        """
        return read(self, x, cache, lengths, logits)

    @property
    def reader(self) -> Reader:
        """The rules that `read` goes by."""
        if self._reader is None:
            self._reader = Reader(self)
        return self._reader

    def start(self, batch: int) -> State:
        """The memory of a text that begins: empty, or zeros that are attended to, as in the paper's code."""
        weight = next(self.blocks.parameters())
        dtype, dim = weight.dtype, self.config.dim
        lengths = [n if self.config.original else 0 for n in self.memory_lengths()]
        return State(tuple(torch.zeros(batch, n, dim, dtype=dtype, device=weight.device) for n in lengths))

    def mechanisms(self) -> list[Attention]:
        """The attention mechanism of each layer."""
        return [block.attention.mechanism for block in self.blocks if isinstance(block, Block)]

    def spans_modules(self) -> list[AdaptiveSpan]:
        """Every part of a layer that learns static spans."""
        return [m for m in self.blocks.modules() if isinstance(m, AdaptiveSpan)]

    def dynamic_parts(self) -> dict[str, DynamicSpan]:
        """Every part of a layer whose tokens choose their spans, by the layer's name."""
        found = ((f"layer {n + 1}", m) for n, block in enumerate(self.blocks) for m in block.modules())
        return {name: m for name, m in found if isinstance(m, DynamicSpan)}

    def after_step(self) -> None:
        """Put spans back into their range; to be called after every optimiser step."""
        for mechanism in self.mechanisms():
            mechanism.after_step()

    def compile_feedforwards(self) -> None:
        """torch.compile norm, feed-forward and sum of every block. Attention stays as it is: its shapes follow the
        spans, so that it would be compiled again and again. Experts stay too: theirs follow the tokens."""
        for block in self.blocks:
            if isinstance(block, Block) and isinstance(block.feedforward, FeedForward):
                block.feed = torch.compile(block.feed, dynamic=True)

    def spans(self) -> list[list[float | None]]:
        """[layers][heads] learned spans in tokens (of dynamic ones, the latest average); None where none is learned."""
        read_spans(self.spans_modules())
        return [mechanism.learned() for mechanism in self.mechanisms()]

    def lookback(self) -> list[list[int]]:
        """[layers][heads] how many earlier tokens each head can see now."""
        read_spans(self.spans_modules())
        return [mechanism.lookback() for mechanism in self.mechanisms()]

    def distances(self) -> list[list[int]]:
        """[layers][heads] how many distances each head looks at now; a token's distance to itself is one of them,
        unless `original` leaves it out."""
        return [[n + (not self.config.original) for n in layer] for layer in self.lookback()]

    def memory_lengths(self) -> list[int]:
        """[layers] how many earlier states each layer keeps now."""
        return [memory_length(each) for each in self.lookback()]

    def _check(self, x: Tensor, targets: Tensor | None) -> None:
        if x.ndim != 2 or x.is_floating_point():
            raise ValueError(f"x has shape {list(x.shape)} and dtype {x.dtype}; expected token ids [B, T]")
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
