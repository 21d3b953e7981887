"""One block of a transformer: attention and a feed-forward, each added to the stream, with the norm before or after.

pre     x + f(norm(x))            post    norm(x + f(x))

In a decoder a second attention, over the states of an encoder, stands between the two.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from spanformer.attention import View
from spanformer.memory import Source
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.layer import SelfAttention
from spanformer.position import Position

Heard = tuple[Tensor, Tensor | None]
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
        self, x: Tensor, past: Tensor, view: View, position: Position, heard: Heard | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """x [B, T, dim], past [B, M, dim] → new x, what of it is remembered [B, T, dim], what to add to the loss.
        heard: of a decoder's layer, the encoder's states."""
        h = self.norm1(x) if self.pre else x
        found, penalty = self.attention(h, past, view, position)
        x = x + found if self.pre else self.norm1(x + found)
        # here and not before: where weights are sharded, a block's are whole only while it runs
        source = None if heard is None or self.cross is None else self.cross.source(*heard)
        x, auxiliary = self.feed(self.listen(x, source))
        return x, h, _plus(penalty, auxiliary)

    def listen(self, x: Tensor, source: Source | None) -> Tensor:
        """The attention to the encoder's states, x [B, T, dim] → new x; nothing without them."""
        if source is None:
            return x
        assert self.cross is not None and self.norm3 is not None
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
