"""One block of a transformer: attention and a feed-forward, each added to the stream, with the norm before or after.

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
    """What a layer remembers is what its attention projects: with pre-norm the normed states, which then need no norm
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
        """cross, norm3: of a decoder's layer."""
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
        """x [B, T, dim] → new x, what a memory may keep of it [B, T, dim], what to add to the loss. encoder_states: of
        a decoder's layer, the encoder's states or the keys and values made of them."""
        h = self.norm1(x) if self.pre else x
        found, penalty = self.attention(h, memory, view, position)
        x = x + found if self.pre else self.norm1(x + found)
        x, auxiliary = self.feed(self.cross_attend(x, encoder_states))
        return x, h, _plus(penalty, auxiliary)

    def cross_attend(self, x: Tensor, encoder_states: EncoderStates | Source | None) -> Tensor:
        """The attention to the encoder's states, x [B, T, dim] → new x; nothing without them."""
        if encoder_states is None or self.cross is None or self.norm3 is None:
            return x
        # here and not before: where weights are sharded, a block's are whole only while it runs
        source = encoder_states if isinstance(encoder_states, Source) else self.cross.source(*encoder_states)
        found = self.cross(self.norm3(x) if self.pre else x, source)
        return x + found if self.pre else self.norm3(x + found)

    def feed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward half, x [B, T, dim] → new x, what to add to the loss. No shape in it depends on spans, so
        this is what can be compiled (`LM.compile_feedforwards`)."""
        if self.feedforward is None or self.norm2 is None:
            return x, None
        added, auxiliary = self.feedforward(self.norm2(x) if self.pre else x)
        return x + added if self.pre else self.norm2(x + added), auxiliary


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else torch.add(a, b)
