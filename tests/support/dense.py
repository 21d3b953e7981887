"""Attention under a dense mask, from the equation, and rules held to it.

Shapes: B batch, H heads, Hkv key/value heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spanformer import Rule, attend


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax over what the mask shows, rows that see nothing zero; from the equation."""
    score = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    top = torch.where(mask, score, -1e30).amax(-1, keepdim=True)
    weight = torch.where(mask, (torch.where(mask, score, 0) - top.clamp(min=-1e29)).exp(), 0)
    return weight @ v / weight.sum(-1, keepdim=True).clamp(min=1e-30)


def held_to_the_oracle(rule: Rule, mask: Tensor, backend: str, batch: int = 2, kv_heads: int = 2) -> None:
    """Values and gradients against float64; allowed: what a dense float32 run is off, times four."""
    heads, length = rule.heads, mask.shape[-1]
    g = torch.Generator().manual_seed(length)
    inputs = [torch.randn(batch, h, length, 16, generator=g) for h in (heads, kv_heads, kv_heads)]
    toward = torch.randn(batch, heads, length, 16, generator=g)

    def outcome(dtype: torch.dtype, run: Callable) -> list[Tensor]:
        q, k, v = leaves = [t.to(dtype).requires_grad_() for t in inputs]
        out = run(q, k, v)
        return [t.double() for t in (out, *torch.autograd.grad((out * toward.to(dtype)).sum(), leaves))]

    def plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = heads // kv_heads
        return oracle(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), mask)

    true, same = outcome(torch.float64, plainly), outcome(torch.float32, plainly)
    got = outcome(torch.float32, lambda q, k, v: attend(q, k, v, rule, backend=backend).out)
    for a, b, c in zip(true, same, got, strict=True):
        assert (c - a).abs().max() <= 4 * (b - a).abs().max() + 1e-5
