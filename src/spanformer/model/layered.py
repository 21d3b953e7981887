"""What language models, encoders and encoder–decoders have in common: layers whose heads have spans."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spanformer.attention import AdaptiveSpan, Attention, DynamicSpan, View, read_spans
from spanformer.model.block import Block, Heard
from spanformer.model.build import make_block, make_embedding, make_position
from spanformer.model.config import ModelConfig
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head
from spanformer.model.feedforward import FeedForward
from spanformer.model.norm import make_norm
from spanformer.position import Position


class Output(NamedTuple):
    logits: Tensor | None
    """[B, T, V], unless targets were given"""
    nll: Tensor | None
    """[B, T] negative log-likelihood in nats of each target, if given"""
    penalty: Tensor
    """a scalar to add to the mean loss: the price of spans, of unbalanced experts"""


class Layered(nn.Module):
    """Tokens to vectors, blocks, and back: what each kind of model does with them it says itself."""

    embedding: Embedding | AdaptiveEmbedding
    head: Head | AdaptiveHead

    def __init__(
        self, config: ModelConfig, kind: Literal["lm", "seq2seq", "encoder"], *, tokens: bool = True
    ) -> None:  # fmt: skip
        """tokens: whether it has an embedding and an output layer of its own."""
        super().__init__()
        if config.kind != kind:
            raise ValueError(f"model.kind is {config.kind!r}; expected {kind!r} for {type(self).__name__}")
        self.config = config
        if tokens:
            self.embedding, self.head = make_embedding(config)
        one_each = range(config.layers if config.position.per_layer else 0)
        made = [make_position(config, n) for n in one_each]
        self.position = nn.ModuleList(made) if made else make_position(config)
        self.blocks = nn.ModuleList(make_block(config, parts) for parts in config.stack())
        self.norm = make_norm(config.norm, config.dim) if config.order == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.embedding.dropout)
        self.checkpointing = False
        """recompute each block in the backward pass instead of keeping its activations"""

    def layers(self) -> list[Block]:
        """Every layer, in the order in which a text goes through them."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def positions(self) -> list[Position]:
        """The position encoding of each layer: the same for all, or one for each."""
        if isinstance(self.position, Position):
            return [self.position] * self.config.layers
        return [position for position in self.position if isinstance(position, Position)]

    def place(self, n: int, h: Tensor, start: int) -> Tensor:
        """What goes into layer n, h [B, T, dim] at positions start, start + 1, …, made to know where it stands."""
        return self.positions()[n].embed(h, start) if not n or self.config.position.per_layer else h

    def through(
        self, block: nn.Module, h: Tensor, past: Tensor, view: View, position: Position, heard: Heard | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One block; see `Block.forward`."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(block, h, past, view, position, heard, use_reentrant=False)  # pyright: ignore
        return block(h, past, view, position, heard)

    def mechanisms(self) -> list[Attention]:
        """The attention mechanism of each layer."""
        return [block.attention.mechanism for block in self.layers()]

    def spans_modules(self) -> list[AdaptiveSpan]:
        """Every part of a layer that learns static spans."""
        return [m for block in self.layers() for m in block.modules() if isinstance(m, AdaptiveSpan)]

    def dynamic_parts(self) -> dict[str, DynamicSpan]:
        """Every part of a layer whose tokens choose their spans, by the layer's name."""
        found = ((f"layer {n + 1}", m) for n, block in enumerate(self.layers()) for m in block.modules())
        return {name: m for name, m in found if isinstance(m, DynamicSpan)}

    def after_step(self) -> None:
        """Put spans back into their range; to be called after every optimiser step."""
        for mechanism in self.mechanisms():
            mechanism.after_step()

    def compile_feedforwards(self) -> None:
        """torch.compile norm, feed-forward and sum of every block. Attention stays as it is: its shapes follow the
        spans, so that it would be compiled again and again. Experts stay too: theirs follow the tokens."""
        for block in self.layers():
            if isinstance(block.feedforward, FeedForward):
                block.feed = torch.compile(block.feed, dynamic=True)

    def spans(self) -> list[list[float | None]]:
        """[layers][heads] learned spans in tokens (of dynamic ones, the latest average); None where none is learned."""
        read_spans(self.spans_modules())
        return [mechanism.learned() for mechanism in self.mechanisms()]

    def lookback(self) -> list[list[int]]:
        """[layers][heads] how many earlier tokens each head of `blocks` can see now."""
        read_spans(self.spans_modules())
        return [block.attention.mechanism.lookback() for block in self.blocks if isinstance(block, Block)]

    def distances(self) -> list[list[int]]:
        """[layers][heads] how many distances each head looks at now (with dynamic spans, the latest average); a token's
        distance to itself is one of them, unless `original` leaves it out."""
        read_spans(self.spans_modules())
        return [[n - self.config.original for n in mechanism.looked()] for mechanism in self.mechanisms()]
