"""The base class of language models, encoders and encoder–decoders: a stack of blocks whose heads have spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from spanformer.attention import (
    AdaptiveSpan,
    Attention,
    Choices,
    DynamicSpan,
    View,
    read_spans,
    remembers_itself,
)
from spanformer.depth import ACT
from spanformer.memory import HiddenStates, LayerMemory, MemoryShape, Source
from spanformer.model.block import Block, EncoderStates
from spanformer.model.build import make_block, make_depth, make_embedding, make_position
from spanformer.model.config import ModelConfig
from spanformer.model.embedding import AdaptiveEmbedding, AdaptiveHead, Embedding, Head
from spanformer.model.feedforward import FeedForward
from spanformer.model.norm import make_norm
from spanformer.model.recompute import recomputed
from spanformer.model.reversible import Streams
from spanformer.position import Position
from spanformer.position.absolute import sinusoids

M = TypeVar("M", bound=LayerMemory)
UNLIMITED = 1 << 48
"""tokens: more than any text has"""
AddPositions = Callable[[Position, Tensor], Tensor]


class Output(NamedTuple):
    logits: Tensor | None
    """[B, T, V], unless targets were given"""
    nll: Tensor | None
    """[B, T] negative log-likelihood in nats of each target, if given"""
    penalty: Tensor
    """a scalar to add to the mean loss: penalties for spans and for unbalanced experts"""


class TransformerStack(nn.Module):
    """Embedding, blocks and output layer; each kind of model has its own `forward`."""

    embedding: Embedding | AdaptiveEmbedding
    head: Head | AdaptiveHead

    def __init__(
        self, config: ModelConfig, kind: Literal["lm", "seq2seq", "encoder"], *, tokens: bool = True
    ) -> None:  # fmt: skip
        """tokens: whether it has its own embedding and output layer."""
        super().__init__()
        if config.kind != kind:
            raise ValueError(f"model.kind is {config.kind!r}; expected {kind!r} for {type(self).__name__}")
        self.config = config
        if tokens:
            self.embedding, self.head = make_embedding(config)
        one_each = range(config.layers if config.position.per_layer else 0)
        made = [make_position(config, n) for n in one_each]
        self.position = nn.ModuleList(made) if made else make_position(config)
        specs = config.layer_specs()
        self.blocks = nn.ModuleList(make_block(config, parts) for parts in specs[: config.own_blocks])
        self.depth = make_depth(config)
        """what decides how many layers each token runs through; None: all"""
        self.norm = make_norm(config.norm, config.dim) if config.order == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.embedding.dropout)
        self.checkpointing = False
        """recompute each block in the backward pass instead of keeping its activations"""

    def layers(self) -> list[Block]:
        """Every layer, in the order of the forward pass."""
        return self.ordered_blocks()

    def ordered_blocks(self) -> list[Block]:
        """The layers of `blocks`, in the order of the forward pass: a universal stack runs one block again and
        again."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return blocks * (self.config.layers // len(blocks))

    def positions(self) -> list[Position]:
        """The position encoding of each layer: the same for all, or one for each."""
        if isinstance(self.position, Position):
            return [self.position] * self.config.layers
        return [position for position in self.position if isinstance(position, Position)]

    def empty_memories(self, h: Tensor) -> list[LayerMemory]:
        """Each layer's memory before a text h [B, T, dim] that is read whole."""
        shape = MemoryShape(len(h), self.config.groups, self.config.head_dim, dtype=h.dtype, device=h.device)
        return [block.new_memory(shape, lambda *_: HiddenStates(h[:, :0])) for block in self.ordered_blocks()]

    def draw_offsets(self, batch: int, device: torch.device) -> Tensor | None:
        """[B] the positions at which new texts begin, in training with `position.random_start`; None: at 0."""
        most = self.config.position.random_start
        return torch.randint(most, (batch,), device=device) if most and self.training else None

    @staticmethod
    def positions_from(seen: int, h: Tensor, offset: Tensor | None) -> int | Tensor:
        """The positions of h [B, T, dim] after `seen` tokens of texts that begin at offset [B]: those of all tokens
        [B, T], or the first one's."""
        step = torch.arange(seen, seen + h.shape[1], device=h.device)
        return seen if offset is None else offset.to(h.device)[:, None] + step

    def run_blocks(
        self, h: Tensor, memories: list[M], view: View, add_positions: AddPositions,
        encoder_states: Sequence[EncoderStates | Source | None] = (),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run embedded tokens h [B, T, dim] through all blocks: the last block's output, and a term of the loss.

        memories: one per layer, replaced by those after these tokens. add_positions(position, h): the input of a layer
        that has its own absolute positions. encoder_states: for a decoder, one per layer.
        """
        penalty = h.new_zeros((), dtype=torch.promote_types(h.dtype, torch.float32))
        x: Tensor | Streams = h
        depth = None if self.depth is None else self.depth.start(h, view.padding, self.predict)
        view = view if depth is None else replace(view, active=depth.active())
        for n, (block, position) in enumerate(zip(self.ordered_blocks(), self.positions(), strict=True)):
            if n and view.nobody and isinstance(x, Tensor) and self.skip_from(n, x, memories):
                break
            before, x = x, self._enter(n, x, partial(add_positions, position))
            x, states, added = self._run_block(
                block, x, memories[n], view, position, encoder_states[n] if encoder_states else None
            )
            memories[n] = memories[n].keep(states)
            penalty = penalty if added is None else penalty + added
            if depth is not None and isinstance(x, Tensor) and isinstance(before, Tensor):
                x = depth.after(n, before, x)
                if (active := depth.active()) is not view.active:
                    view = replace(view, active=active)
        if depth is None or isinstance(x, Streams):
            return x.mean() if isinstance(x, Streams) else x, penalty
        x, added = depth.finish(x)
        return x, penalty if added is None else penalty + added

    def skip_from(self, n: int, x: Tensor, memories: Sequence[LayerMemory]) -> bool:
        """Let layer n, counted from 0, and all later ones store x [B, T, dim], which none of them computes. False: they
        have to run."""
        return False

    def _enter(self, n: int, x: Tensor | Streams, add_positions: Callable[[Tensor], Tensor]) -> Tensor | Streams:
        """The input of layer n, counted from 0: x with positions, or in a universal stack with the step's number."""
        position = self.config.position
        if not n or position.per_layer:
            x = _with_positions(x, add_positions)
        if n and self.config.stack == "universal" and not (position.per_layer and position.absolute):
            at = sinusoids(torch.full((), n + 1), self.config.dim)
            x = _with_positions(x, lambda h: h + at.to(h))
        return x if n else self._start(x)

    def _start(self, h: Tensor | Streams) -> Tensor | Streams:
        """What the first block gets, of embedded tokens [B, T, dim] with their positions."""
        assert isinstance(h, Tensor)
        dropped: Tensor = self.dropout(h)
        return Streams.start(dropped) if self.config.stack == "reversible" else dropped

    def _run_block(
        self, block: nn.Module, x: Tensor | Streams, memory: LayerMemory, view: View, position: Position,
        encoder_states: EncoderStates | Source | None,
    ) -> tuple[Tensor | Streams, Tensor, Tensor | None]:  # fmt: skip
        """One block; see `Block.forward`. A reversible one keeps nothing that checkpointing could save."""
        if self.checkpointing and isinstance(x, Tensor):
            return recomputed(block, x, memory, view, position, encoder_states)
        return block(x, memory, view, position, encoder_states)

    def predict(self, states: Tensor) -> Tensor:
        """The logits [N, V] of states [N, dim] after any layer."""
        return self.head.logits(self.norm(states[None]))[0]

    def mechanisms(self) -> list[Attention]:
        """The attention mechanism of each layer."""
        return [block.attention.mechanism for block in self.layers()]

    def spans_modules(self) -> list[AdaptiveSpan]:
        """Every part of a layer that learns static spans."""
        found = (m for block in self.layers() for m in block.modules() if isinstance(m, AdaptiveSpan))
        return list(dict.fromkeys(found))

    def dynamic_parts(self) -> dict[str, DynamicSpan]:
        """Every part of a layer with dynamic spans, by the layer's name."""
        found = ((f"layer {n + 1}", m) for n, block in enumerate(self.layers()) for m in block.modules())
        return {name: m for name, m in found if isinstance(m, DynamicSpan)}

    def after_step(self) -> None:
        """Clamp spans to their range, and let decoding prepare its rules anew: torch's fused optimisers change tensors
        without a new version. Call it after every optimiser step."""
        increment_version([p for p in self.parameters() if p.requires_grad and not p.is_inference()])
        for mechanism in dict.fromkeys(self.mechanisms()):
            mechanism.after_step()
        for part in self.modules():
            if isinstance(part, ACT):
                part.after_step()

    def learn_from(self, nll: Tensor, weight: Tensor) -> None:
        """Before a backward pass: tell mechanisms that draw their keys the losses [B, T] of the targets, and what each
        counts in the mean loss."""
        for part in self.modules():
            if isinstance(part, Attention):
                part.learn_from(nll, weight)

    def choices(self) -> list[Choices]:
        """How queries of hard attention chose their keys in the last training step, one for each such mechanism."""
        found = (part.choices() for part in self.modules() if isinstance(part, Attention))
        return [each for each in found if each is not None]

    def advice(self) -> dict[str, str]:
        """What users should know about how mechanisms train, by layer."""
        found = ((f"layer {n}", m.advice()) for n, m in enumerate(self.mechanisms(), 1))
        return {name: text for name, text in found if text}

    def compile_feedforwards(self) -> None:
        """torch.compile norm, feed-forward and sum of every block. Attention is not compiled: its shapes follow the
        spans, so it would be recompiled often. Nor are experts, whose shapes follow the tokens, and chunked
        feed-forwards, which the backward pass runs again."""
        for block in dict.fromkeys(self.layers()):
            if isinstance(block.feedforward, FeedForward) and not block.feedforward.chunk:
                block.feed = torch.compile(block.feed, dynamic=True)
                block.fed = torch.compile(block.fed, dynamic=True)  # a reversible block's

    def spans(self) -> list[list[float | None]]:
        """[layers][heads] learned spans in tokens (for dynamic spans, the latest average); None for heads that learn
        none."""
        read_spans(self.spans_modules())
        return [mechanism.spans() for mechanism in self.mechanisms()]

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        """Parameters that only the mechanisms' own losses train, such as those of a compression."""
        return [p for m in self.modules() if isinstance(m, Attention) for p in m.auxiliary_parameters()]

    def context_length(self) -> list[list[int]]:
        """[layers][heads] how many earlier tokens each head of `blocks` can see now."""
        read_spans(self.spans_modules())
        return [block.attention.mechanism.context_length() for block in self.ordered_blocks()]

    def receptive_field(self) -> int:
        """How many of a text's last tokens can affect the next one; where a layer has a recurrent state, all."""
        parts = [part for mechanism in self.mechanisms() for part in mechanism.modules() if isinstance(part, Attention)]
        recurrent = any(remembers_itself(part) for part in parts)
        return UNLIMITED if recurrent else 1 + sum(map(max, self.context_length()))

    def distances(self) -> list[list[int]]:
        """[layers][heads] how many distances each head sees now (for dynamic spans, the latest average); a token's
        distance to itself is one of them, unless `paper_compat` leaves it out."""
        read_spans(self.spans_modules())
        return [[n - self.config.paper_compat for n in mechanism.mean_context()] for mechanism in self.mechanisms()]


def _with_positions(x: Tensor | Streams, add: Callable[[Tensor], Tensor]) -> Tensor | Streams:
    return x.add_positions(add) if isinstance(x, Streams) else add(x)
