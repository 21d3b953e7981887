"""One block of a transformer: attention and a feed-forward, each added to its input, with the norm before or after.

pre     x + f(norm(x))            post    norm(x + f(x))

A decoder has a second attention between the two, over the states of an encoder.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from spanformer.attention import View
from spanformer.memory import LayerMemory, Source
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.layer import SelfAttention
from spanformer.position import Position

EncoderStates = tuple[Tensor, Tensor | None]
"""states of an encoder [B, S, dim], and their padding [B, S] bool"""


class Block(nn.Module):
    """A layer remembers the states that its attention projects: with pre-norm the normed ones, which need no norm
    a second time."""

    def __init__(
        self,
        attention: SelfAttention,
        norm1: nn.Module,
        feedforward: nn.Module | None,
        norm2: nn.Module | None,
        order: Literal["pre", "post"],
        cross: CrossAttention | None = None,
        norm3: nn.Module | None = None,
    ) -> None:
        """cross, norm3: for a decoder's layer only."""
        super().__init__()
        self.attention, self.norm1, self.feedforward, self.norm2 = attention, norm1, feedforward, norm2
        self.cross, self.norm3 = cross, norm3
        self.pre = order == "pre"

    def forward(
        self,
        x: Tensor,
        memory: LayerMemory,
        view: View,
        position: Position,
        encoder_states: EncoderStates | Source | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, T, dim] → new x, the states that a memory may keep [B, T, dim], a term of the loss. encoder_states: for
        a decoder's layer, the encoder's states or their keys and values."""
        h = self.norm1(x) if self.pre else x
        found, penalty = self.attention(h, memory, view, position)
        x = x + found if self.pre else self.norm1(x + found)
        x, auxiliary = self.feed(self.cross_attend(x, encoder_states))
        return x, h, _plus(penalty, auxiliary)

    def cross_attend(self, x: Tensor, encoder_states: EncoderStates | Source | None) -> Tensor:
        """Attention to the encoder's states, x [B, T, dim] → new x; x itself without them."""
        if encoder_states is None or self.cross is None or self.norm3 is None:
            return x
        # here and not earlier: sharded weights are gathered only while their block runs
        source = encoder_states if isinstance(encoder_states, Source) else self.cross.source(*encoder_states)
        found = self.cross(self.norm3(x) if self.pre else x, source)
        return x + found if self.pre else self.norm3(x + found)

    def feed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward half, x [B, T, dim] → new x, a term of the loss. None of its shapes depends on spans, so
        it can be compiled (`LM.compile_feedforwards`)."""
        if self.feedforward is None or self.norm2 is None:
            return x, None
        added, auxiliary = self.feedforward(self.norm2(x) if self.pre else x)
        return x + added if self.pre else self.norm2(x + added), auxiliary


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else torch.add(a, b)
