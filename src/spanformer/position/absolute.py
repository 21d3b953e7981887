"""Absolute positions, added to the hidden states.

Sinusoidal: Attention Is All You Need (Vaswani et al., 2017), §3.5. https://arxiv.org/abs/1706.03762
Before every layer, with the layer's number: Universal Transformers (Dehghani et al., 2018), §2.1.
https://arxiv.org/abs/1807.03819
Learned: Convolutional Sequence to Sequence Learning (Gehring et al., 2017), §3.1. https://arxiv.org/abs/1705.03122
Before every layer, each with its own table: Character-Level Language Modeling with Deeper Self-Attention (Al-Rfou
et al., 2018), §3. https://arxiv.org/abs/1808.04444

    Sinusoidal           x_t + p_t          p_t[2c] = sin(t · base^(−2c / dim)), p_t[2c + 1] = cos(t · base^(−2c / dim))
    SinusoidalPerLayer   x_t + p_t + p_l    before layer l = 1, 2, …, with the same p
    Learned              x_t + w_t          a vector for each position

Shapes: B batch, T tokens, L positions, dim of hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.kinds import PositionSpec
from spanformer.position.base import Position


class Sinusoidal(Position):
    """Defined for every position, so a text may have any length."""

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        if dim < 1 or not base > 0:
            raise ValueError(f"dim is {dim} and base {base}; expected a dim of at least 1 and a positive base")
        self.dim, self.base = dim, base

    @classmethod
    def build(cls, spec: PositionSpec) -> Sinusoidal:
        return cls(spec.dim, spec.base)

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        return x + sinusoids(places(x, start), self.dim, self.base).to(x.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base:g}"


class SinusoidalPerLayer(Sinusoidal):
    """For one layer, counted from 1."""

    def __init__(self, dim: int, layer: int, base: float = 10000.0) -> None:
        super().__init__(dim, base)
        if layer < 1:
            raise ValueError(f"layer is {layer}; expected at least 1")
        self.layer = layer

    @classmethod
    def build(cls, spec: PositionSpec) -> SinusoidalPerLayer:
        return cls(spec.dim, spec.layer + 1, spec.base)

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        mine = sinusoids(torch.full((), self.layer, device=x.device), self.dim, self.base)
        return super().embed(x, start) + mine.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, layer={self.layer}"


class Learned(Position):
    """A table of `length` positions; a token beyond it raises a ValueError."""

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        if dim < 1 or length < 1:
            raise ValueError(f"dim is {dim} and length {length}; expected at least 1 each")
        self.weight = nn.Parameter(torch.randn(length, dim) * 0.02)
        """[L, dim]"""

    @classmethod
    def build(cls, spec: PositionSpec) -> Learned:
        return cls(spec.dim, spec.length)

    def embed(self, x: Tensor, start: int | Tensor) -> Tensor:
        at, length = places(x, start), len(self.weight)
        ends = None  # the first and last position, if the host knows them
        if isinstance(start, int):
            ends = (start, start + x.shape[1] - 1)
        elif at.device.type == "cpu" and at.numel():
            ends = (int(at.min()), int(at.max()))
        if ends is not None and x.shape[1] and (ends[0] < 0 or ends[1] >= length):
            raise ValueError(
                f"a token is at position {ends[0] if ends[0] < 0 else ends[1]} of its text, and learned positions end "
                f"at {length - 1}; increase their length, start a new text, or use sinusoidal or relative positions"
            )
        return x + self.weight[at].to(x.dtype)

    def extra_repr(self) -> str:
        return f"dim={self.weight.shape[1]}, length={self.weight.shape[0]}"


def places(x: Tensor, start: int | Tensor) -> Tensor:
    """[T] or [B, T]: the positions of the tokens x [B, T, dim]."""
    if isinstance(start, Tensor):
        return start
    return torch.arange(start, start + x.shape[1], device=x.device)


def sinusoids(at: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """at [...] → [..., dim] in float64: in float32 the error of the angle at position 10 million is up to half a
    radian."""
    component = torch.arange(0, dim, 2, device=at.device, dtype=torch.float64)
    angle = at[..., None] * base ** (-component / dim)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., :dim]
