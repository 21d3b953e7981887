"""A reversible stack: a layer's inputs are computed from its outputs, so that no layer keeps activations.

Reformer (Kitaev, Kaiser, Levskaya, 2020), §3, https://arxiv.org/abs/2001.04451, after The Reversible Residual Network
(Gomez et al., 2017), https://arxiv.org/abs/1707.04585

    x1 = x2 = h                                     y1 = x1 + f(x2)             y2 = x2 + g(y1)
    f attention, g feed-forward, each normed        x2 = y2 − g(y1)             x1 = y1 − f(x2)
    the stack's output: (x1 + x2) / 2

The backward pass runs f and g once more, each with its random state, and takes their gradients from this second run.
Both streams are float32 or wider, whatever the layers compute in: differences of narrower numbers lose too much. A
layer without feed-forward exchanges the streams, y1 = x2 and y2 = x1 + f(x2).

Shapes: B batch, T tokens, dim of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spanformer.core.recompute import before_recompute
from spanformer.model.recompute import Moment

First = Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""x2 → what attention adds, what a memory may keep of it, what to add to the loss"""
Second = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""y1, an encoder's states → what the feed-forward adds, what to add to the loss"""
AddPositions = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Chain:
    """Hands each layer's inputs to the backward pass of the layer before, whose outputs they are."""

    layers: int = 0
    """how many layers have run"""
    outputs: tuple[Tensor, Tensor] | None = None
    """both streams, detached, behind the first `at` layers"""
    at: int = 0
    shifts: dict[int, AddPositions] = field(default_factory=dict)
    """what was added to the second stream before a layer, by the layer's number"""
    moment: Moment | None = None
    """the latest"""

    def now(self, device: torch.device) -> Moment:
        self.moment = Moment(device, self.moment)
        return self.moment

    def append(self, outputs: tuple[Tensor, Tensor]) -> int:
        """The number of the layer that has these outputs."""
        self.layers += 1
        self.outputs, self.at = outputs, self.layers
        return self.layers - 1

    def take(self, layer: int) -> tuple[Tensor, Tensor]:
        outputs, self.outputs = self.outputs, None
        if outputs is None or self.at != layer + 1:
            raise RuntimeError(
                "a reversible stack rebuilds its activations once, from the last layer to the first; run the forward "
                "pass again before a second backward pass, and let the loss depend on the last layer"
            )
        return outputs

    def give(self, layer: int, x1: Tensor, x2: Tensor) -> None:
        """The inputs of this layer, which has run backwards."""
        if layer:
            if layer in self.shifts:
                x2 = x2 - self.shifts[layer](torch.zeros_like(x2))
            self.outputs, self.at = (x1, x2), layer


class Streams(NamedTuple):
    """The input of a reversible layer: two tensors [B, T, dim]."""

    first: Tensor
    second: Tensor
    dtype: torch.dtype
    """that layers compute in"""
    chain: Chain | None
    """None: without gradients, nothing has to be rebuilt"""

    @classmethod
    def start(cls, h: Tensor) -> Streams:
        wide = h.to(torch.promote_types(h.dtype, torch.float32))
        return cls(wide, wide, h.dtype, Chain() if torch.is_grad_enabled() else None)

    def add_positions(self, add: AddPositions) -> Streams:
        """With the positions of the next layer on its second stream, which attention reads."""
        if self.chain is not None:
            self.chain.shifts[self.chain.layers] = add
        return self._replace(second=add(self.second))

    def mean(self) -> Tensor:
        return ((self.first + self.second) * 0.5).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Halves:
    """The two functions of a layer."""

    attend: First
    feed: Second | None
    """None: the layer has no feed-forward"""
    chunk: int
    """how many tokens `feed` may take at a time, if it is the same for each token; 0: all"""
    encoder_states: Tensor | None
    parameters: Sequence[nn.Parameter]

    def run(self, streams: Streams) -> tuple[Streams, Tensor, Tensor | None]:
        """The streams behind the layer, what a memory may keep, what to add to the loss."""
        x1, x2, dtype, chain = streams
        if chain is None:
            y1, y2, states, penalty = self.forward(x1, x2, dtype)
        else:
            trained = [p for p in self.parameters if p.requires_grad]
            y1, y2, states, penalty = _Layer.apply(self, chain, dtype, x1, x2, self.encoder_states, *trained)
        return Streams(y1, y2, dtype, chain), states, penalty

    def forward(
        self, x1: Tensor, x2: Tensor, dtype: torch.dtype, between: Callable[[], object] = lambda: None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """between: called when attention is done."""
        added, states, penalty = self.attend(x2.to(dtype))
        y1 = x1 + added
        between()
        if self.feed is None:
            return x2, y1, states, penalty
        added, auxiliary = self.feed(y1.to(dtype), self.encoder_states)
        return y1, x2 + added, states, _plus(penalty, auxiliary)


class _Layer(torch.autograd.Function):
    """One layer. Parameters are arguments, so that their gradients arrive where PyTorch's engines wait for them."""

    @staticmethod
    def forward(ctx: Any, halves: Halves, chain: Chain, dtype: torch.dtype, x1: Tensor, x2: Tensor, *others: Any):
        ctx.moments = [chain.now(x1.device)]
        with ctx.moments[0].cast(), before_recompute():
            y1, y2, states, penalty = halves.forward(
                x1, x2, dtype, lambda: ctx.moments.append(chain.now(x1.device))
            )  # fmt: skip
        y1, y2 = (y.clone() if y is x else y for y, x in ((y1, x2), (y2, x2)))
        ctx.halves, ctx.chain, ctx.dtype = halves, chain, dtype
        ctx.save_for_backward(*others[1:])
        ctx.layer = chain.append((y1.detach(), y2.detach()))
        ctx.mark_non_differentiable(states)
        return y1, y2, states, penalty

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g1: Tensor, g2: Tensor, _states: Tensor, g_penalty: Tensor | None):
        halves, trained, chain = ctx.halves, ctx.saved_tensors, ctx.chain
        y1, y2 = chain.take(ctx.layer)
        again = _Again(ctx.dtype, trained, g_penalty)
        if halves.feed is None:
            y1, y2, g1, g2 = y2, y1, g2, g1
        else:
            with ctx.moments[1].again():
                added, g_y1 = again.feed(halves, y1, g2)
            y2, g1 = y2 - added, g1 + g_y1
        x2 = y2
        with ctx.moments[0].again():
            added, g_x2 = again.attend(halves, x2, g1)
        chain.give(ctx.layer, y1 - added, x2)
        return None, None, None, g1, g2 + g_x2, again.of_states, *again.of_trained


class _Again:
    """A second run of a layer's halves, and the gradients of all that they read."""

    def __init__(self, dtype: torch.dtype, trained: Sequence[Tensor], g_penalty: Tensor | None) -> None:
        self.dtype, self.trained, self.g_penalty = dtype, trained, g_penalty
        self.of_trained: list[Tensor | None] = [None] * len(trained)
        self.of_states: Tensor | None = None

    def attend(self, halves: Halves, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, dim] → the value of this half, and the gradient of x; grad: of the value."""
        x = x.detach().requires_grad_()
        added, _, penalty = halves.attend(x.to(self.dtype))
        return added.detach(), self._gradients(x, None, added, penalty, grad)

    def feed(self, halves: Halves, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the feed-forward, some tokens at a time."""
        if not halves.chunk:
            return self._feed(halves, y, grad)
        pieces = zip(*(t.flatten(0, -2).split(halves.chunk) for t in (y, grad)), strict=True)
        both = zip(*(self._feed(halves, *piece) for piece in pieces), strict=True)
        added, g_y = (torch.cat(each).view(y.shape) for each in both)
        return added, g_y

    def _feed(self, halves: Halves, y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert halves.feed is not None
        y, states = y.detach().requires_grad_(), halves.encoder_states
        states = None if states is None else states.detach().requires_grad_(states.requires_grad)
        added, penalty = halves.feed(y.to(self.dtype), states)
        return added.detach(), self._gradients(y, states, added, penalty, grad)

    def _gradients(
        self, x: Tensor, states: Tensor | None, added: Tensor, penalty: Tensor | None, grad: Tensor
    ) -> Tensor:
        outputs, grads = [added], [grad.to(added.dtype)]
        if penalty is not None and penalty.requires_grad and self.g_penalty is not None:
            outputs, grads = [*outputs, penalty], [*grads, self.g_penalty.to(penalty.dtype)]
        other = [states] if states is not None and states.requires_grad else []
        found = torch.autograd.grad(outputs, [x, *other, *self.trained], grads, allow_unused=True)
        self.of_states = _plus(self.of_states, found[1]) if other else self.of_states
        self.of_trained = [_plus(*both) for both in zip(self.of_trained, found[1 + len(other) :], strict=True)]
        return torch.zeros_like(x) if found[0] is None else found[0]


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else torch.add(a, b)
