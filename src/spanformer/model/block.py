"""One block of a transformer: attention and a feed-forward, each added to its input, with the norm before or after.

pre     x + f(norm(x))            post    norm(x + f(x))            gated   g(x, relu(f(norm(x)))), see gates.py
reversible: two streams, see reversible.py

A decoder has a second attention between the two, over the states of an encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from spanformer.attention import Attention, View, new_memory
from spanformer.depth.base import replace_rows
from spanformer.memory import LayerMemory, MemoryShape, Source
from spanformer.model.cross_attention import CrossAttention
from spanformer.model.feedforward import FeedForward
from spanformer.model.layer import SelfAttention, active_rows
from spanformer.model.reversible import Halves, Streams
from spanformer.model.separable_conv import SeparableConv
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
        gate: Callable[[], nn.Module] | None = None,
    ) -> None:
        """cross, norm3: for a decoder's layer only. gate: makes a gate for each sum, which it replaces (gates.py)."""
        super().__init__()
        self.attention, self.norm1, self.feedforward, self.norm2 = attention, norm1, feedforward, norm2
        self.cross, self.norm3 = cross, norm3
        self.pre = order == "pre"
        parts = {"attention": attention, "feedforward": feedforward, "cross": cross}
        self.gates = nn.ModuleDict(
            {name: gate() for name, part in parts.items() if gate is not None and part is not None}
        )
        """by part; a part without one is added"""

    def forward(
        self,
        x: Tensor | Streams,
        memory: LayerMemory,
        view: View,
        position: Position,
        encoder_states: EncoderStates | Source | None = None,
    ) -> tuple[Tensor | Streams, Tensor, Tensor | None]:
        """x [B, T, dim] → new x, the states that a memory may keep [B, T, dim], a term of the loss. encoder_states: for
        a decoder's layer, the encoder's states or their keys and values. Tokens that are not active keep their x."""
        if isinstance(x, Streams):
            return self._halves(memory, view, position, encoder_states).run(x)
        found, h, penalty = self.attend(x, memory, view, position)
        if view.nobody:
            self._convolve(x, found, memory, view)
            return x, h, penalty
        y = self._join("attention", active_rows(x, view.active), found)
        y = y if self.pre else self.norm1(y)
        if self.cross is not None and view.active is not None:
            y = active_rows(self.cross_attend(replace_rows(x, view.active, y), encoder_states), view.active)
        else:
            y = self.cross_attend(y, encoder_states)
        y, auxiliary = self._convolve(x, y, memory, view) or self.feed(y)
        return y if view.active is None else replace_rows(x, view.active, y), h, _plus(penalty, auxiliary)

    def attend(
        self, x: Tensor, memory: LayerMemory, view: View, position: Position
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What attention adds to x [B, T, dim], of active tokens only; the states that a memory may keep; a term of the
        loss."""
        h = self.norm1(x) if self.pre else x
        found, penalty = self.attention(h, memory, view, position)
        return found, h, penalty

    def cross_attend(self, x: Tensor, encoder_states: EncoderStates | Source | None) -> Tensor:
        """Attention to the encoder's states, x [B, T, dim] → new x; x itself without them."""
        found = self._cross(x, encoder_states)
        if found is None or self.norm3 is None:
            return x
        joined = self._join("cross", x, found)
        return joined if self.pre else self.norm3(joined)

    def _cross(self, x: Tensor, encoder_states: EncoderStates | Source | None) -> Tensor | None:
        """What that attention adds to x."""
        if encoder_states is None or self.cross is None or self.norm3 is None:
            return None
        # here and not earlier: sharded weights are gathered only while their block runs
        source = encoder_states if isinstance(encoder_states, Source) else self.cross.source(*encoder_states)
        return self.cross(self.norm3(x) if self.pre else x, source)

    def feed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The feed-forward half, x [B, T, dim] → new x, a term of the loss. None of its shapes depends on spans, so
        it can be compiled (`LM.compile_feedforwards`)."""
        if self.norm2 is None:
            return x, None
        added, auxiliary = self.fed(x)
        joined = self._join("feedforward", x, added)
        return joined if self.pre else self.norm2(joined), auxiliary

    def _convolve(self, x: Tensor, y: Tensor, memory: LayerMemory, view: View) -> tuple[Tensor, None] | None:
        """`feed` for a feed-forward that reads neighbours; None for others. x [B, T, dim]: the block's input, which
        stands for a neighbour that halted; y: the active tokens' sums."""
        if not isinstance(self.feedforward, SeparableConv) or self.norm2 is None:
            return None
        whole = y if view.active is None else replace_rows(x, view.active, y)
        added, _ = self.feedforward(self.norm2(whole) if self.pre else whole, memory, view)
        joined = self._join("feedforward", y, added)
        return joined if self.pre else self.norm2(joined), None

    def new_memory(self, shape: MemoryShape, usual: Callable[[Attention, MemoryShape], Any]) -> Any:
        """An empty memory for this layer. usual: makes that of mechanisms without their own."""
        mechanism = self.attention.mechanism
        memory = new_memory(mechanism, shape, usual)
        if isinstance(self.feedforward, SeparableConv):
            return self.feedforward.with_memory(memory, mechanism, shape)
        return memory

    def _join(self, part: str, x: Tensor, y: Tensor) -> Tensor:
        """The stream x with what a part of the block returned, [..., dim] each."""
        return self.gates[part](x, y.relu()) if part in self.gates else x + y

    def fed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the feed-forward adds to x [..., dim], what to add to the loss."""
        assert self.feedforward is not None and self.norm2 is not None
        return self.feedforward(self.norm2(x) if self.pre else x)

    def _halves(
        self, memory: LayerMemory, view: View, position: Position, encoder_states: EncoderStates | Source | None
    ) -> Halves:
        """Of a reversible layer. Cross-attention belongs to the half of the feed-forward, which reads its sum."""
        fixed = encoder_states if isinstance(encoder_states, Source) else None
        states, padding = (None, None) if isinstance(encoder_states, Source | None) else encoder_states

        def feed(y: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
            crossed = self._cross(y, fixed if states is None else (states, padding))
            if self.feedforward is None:
                return torch.zeros_like(y) if crossed is None else crossed, None
            if crossed is None:
                return self.fed(y)
            added, auxiliary = self.fed(y + crossed)
            return crossed + added, auxiliary

        chunk = self.feedforward.chunk if isinstance(self.feedforward, FeedForward) and self.cross is None else 0
        return Halves(
            lambda x: self.attend(x, memory, view, position),
            None if self.feedforward is None and self.cross is None else feed,
            chunk,
            states,
            [*self.parameters(), *position.parameters()],
        )


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else torch.add(a, b)
