"""A work to time: its sizes, and its input tensors.

Shapes: B batch, H heads, Tq queries, Tk keys, D head size, L the length (of sequence, cache or span).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spanformer.bench import profiles
from spanformer.cost import attention as cost
from spanformer.ops import Rule

MODES = ("forward", "forward+backward", "decode")
KINDS = ("whole", "decode", "streaming")
TERMS = ("plain", "distance_bias", "distance_vec")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Work:
    """The computation to time. "decode" is one query over a KV cache of L keys, whose newest is its own."""

    profile: str
    length: int
    mode: str = "forward+backward"
    batch: int = 1
    heads: int = 8
    dim: int = 64
    terms: str = "plain"
    dtype: str = "float32"
    streaming: int = 0
    """above 0: this many queries after a cache of L keys, with the conventions of the original code"""

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("terms", TERMS), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(allowed)}")
        for name in ("length", "batch", "heads", "dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        self.reaches()  # refuses unknown profiles

    @property
    def kind(self) -> str:
        """ "whole" sequences, one step of "decode", or "streaming": a block of queries after a cache."""
        return "streaming" if self.streaming else "decode" if self.mode == "decode" else "whole"

    @property
    def queries(self) -> int:
        return self.streaming or (1 if self.mode == "decode" else self.length)

    @property
    def keys(self) -> int:
        return self.length + self.streaming

    @property
    def original(self) -> bool:
        return self.streaming > 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def reaches(self) -> list[int]:
        """Number of keys that the queries of each head see."""
        return profiles.reaches(self.profile, self.heads, self.length)

    def flops(self) -> int:
        """Operations on pairs within the spans."""
        return cost.flops(self.reaches(), self.queries, self.dim, mode=self.mode, batch=self.batch, keys=self.keys)

    def dense_bytes(self) -> int:
        """Bytes of one B × H × Tq × Tk tensor of this work's dtype."""
        return self.torch_dtype.itemsize * self.batch * self.heads * self.queries * self.keys


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a work; those with a gradient require it."""

    work: Work
    q: Tensor
    """[B, H, Tq, D]"""
    k: Tensor
    """[B, H, Tk, D]"""
    v: Tensor
    """[B, H, Tk, D]"""
    grad: Tensor
    """[B, H, Tq, D] upstream gradient of the output"""
    span: Tensor
    """[H] float32"""
    distance_bias: Tensor | None = None
    """[H, L]"""
    distance_vec: Tensor | None = None
    """[1, L, D]"""

    def leaves(self) -> dict[str, Tensor]:
        """All tensors that get a gradient, by name."""
        named = {name: getattr(self, name) for name in ("q", "k", "v", "span", "distance_bias", "distance_vec")}
        return {name: t for name, t in named.items() if t is not None}

    def rule(self) -> Rule:
        """The attention rule of this work."""
        return Rule(
            self.work.heads,
            span=self.span,
            ramp=float(profiles.RAMP),
            reach=self.work.length if self.work.original else None,
            distance_bias=self.distance_bias,
            distance_vec=self.distance_vec,
            paper_compat=self.work.original,
        )


def make_inputs(work: Work, seed: int = 0) -> Inputs:
    """Normal random inputs, determined by the work and the seed."""
    g = torch.Generator().manual_seed(seed)
    dtype, b, h, d = work.torch_dtype, work.batch, work.heads, work.dim
    rand = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    q, k, v = rand(b, h, work.queries, d), rand(b, h, work.keys, d), rand(b, h, work.keys, d)
    grad = rand(b, h, work.queries, d)
    span = torch.tensor(profiles.spans(work.profile, h, work.length, between=work.original))
    bias = rand(h, work.length) if work.terms == "distance_bias" else None
    vec = rand(1, work.length, d) if work.terms == "distance_vec" else None
    inputs = Inputs(work, q, k, v, grad, span, bias, vec)
    if work.mode == "forward+backward":
        for leaf in inputs.leaves().values():
            leaf.requires_grad_()
    return inputs
