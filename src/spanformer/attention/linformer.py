"""Linformer: Self-Attention with Linear Complexity (Wang et al., 2020). https://arxiv.org/abs/2006.04768

    out = softmax(q (E k)ᵀ / √D) (F v)            E, F [r, n]: keys and values of n tokens become r

Every projected key is a sum over the whole text, so it is for encoders: a token of a decoder would see the future.
E and F start with variance 1/n, and a text of t < n tokens is scaled by √(n/t): E k varies as much as k does, for any
length. (With variance 1/r, as often, scores grow with √(n/r).) Or, without E and F, pooling by blocks of n/r tokens.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spanformer.attention.base import Attention, View, given_terms, own_output, refused_distances
from spanformer.attention.pooling import BlockPooling
from spanformer.kinds import HeadSpec
from spanformer.ops import AnyRule, Attended, Rule, attend

SHARES = ("none", "headwise", "key_value", "layerwise")
TERMS = ("heads", "causal", "reach", "ramp", "key_bias")
"""of a rule: padding, which `view` holds too"""


class Linformer(Attention):
    """share: none, E and F of every head; headwise, E and F of the layer; key_value, one matrix E = F of the layer;
    layerwise, one of all layers that have this rank and length, and are given the same `shared`."""

    def __init__(
        self, heads: int, rank: int = 64, length: int = 1024, *, kv_heads: int = 0, share: str = "none",
        project: str = "learned", shared: dict[str, nn.Parameter] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        kv_heads = kv_heads or heads
        if heads < 1 or rank < 1 or length < rank:
            raise ValueError(
                f"heads is {heads}, rank {rank} and length {length}; expected at least 1 each, and a rank up to length"
            )
        if share not in SHARES:
            raise ValueError(f"share is {share!r}; expected one of {', '.join(SHARES)}")
        if project != "learned" and share != "none":
            raise ValueError(f"share is {share!r}, and {project} has no E and F to share; expected share none")
        self.heads, self.rank, self.length, self.share, self.causal = heads, rank, length, share, False
        self.pooling = self.f = None
        if project != "learned":
            self.pooling = BlockPooling(kv_heads, -(-length // rank), project)
            return
        shape = kv_heads if share == "none" else 1, rank, length

        def matrix() -> nn.Parameter:
            return nn.Parameter(torch.randn(shape) * length**-0.5)

        known = {} if shared is None or share != "layerwise" else shared
        self.e = known.setdefault(f"linformer {rank} {length}", matrix())
        """[Hkv or 1, r, n]"""
        self.f = matrix() if share in ("none", "headwise") else None
        """None: F = E"""

    @classmethod
    def build(cls, spec: HeadSpec) -> Linformer:
        if spec.causal:
            raise ValueError(
                "linformer sums keys over the whole text, so a token would see the future; expected model.kind "
                "'encoder' (for show: --no-causal), or low_rank in the place of linformer"
            )
        p = spec.p
        return cls(
            spec.heads, p.rank, p.length, kv_heads=spec.kv_heads, share=p.share, project=p.project,
            shared=spec.shared,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = own_output(self, cache=cache, mixed=mixed)
        return reasons + refused_distances(position, "a projected key has no position")

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads, causal=False)

    def context_length(self) -> list[int]:
        return [self.length - 1] * self.heads

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        if others := given_terms(rule, view, TERMS):
            raise ValueError(
                f"{', '.join(others)} was given; Linformer's keys are sums over the whole text, and only padding can "
                "be left out of them"
            )
        hidden = None
        if self.pooling is None:
            k, v = self.project(k, v, view.padding)
        else:
            k, v, empty = self.pooling(k, v, view.padding)
            hidden = torch.zeros(empty.shape, device=k.device).masked_fill(empty, -torch.inf)[:, None]
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, Rule(self.heads, causal=False, key_bias=hidden), backend=self.backend, dropout=dropout)

    def project(self, k: Tensor, v: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """k and v [B, Hkv, T, D] → E k and F v [B, Hkv, r, D]; padding [B, T] bool."""
        t = k.shape[2]
        if t > self.length:
            raise ValueError(
                f"the text has {t} tokens, and E and F are made for {self.length}; expected at most that many: give "
                f"linformer a length of {t}, or cut the text"
            )
        scale: Tensor | float = (self.length / max(t, 1)) ** 0.5
        if padding is not None:
            k, v = (x.masked_fill(padding[:, None, :, None], 0) for x in (k, v))
            real = (~padding).sum(1).clamp(min=1)
            scale = (self.length / real.to(k.dtype)).sqrt()[:, None, None, None]
        e, f = (None if m is None else m[:, :, :t].to(k.dtype) for m in (self.e, self.f))
        k, v = _Sums.apply(e, f, k, v)
        return k * scale, v * scale

    def extra_repr(self) -> str:
        return f"heads={self.heads}, rank={self.rank}, length={self.length}, share={self.share!r}"


class _Sums(torch.autograd.Function):
    """E k and F v, one text after the other: a matrix is not copied for each text, and has one gradient for all. F
    None: E."""

    @staticmethod
    def forward(ctx, e: Tensor, f: Tensor | None, k: Tensor, v: Tensor):
        ctx.save_for_backward(e, f, k, v)
        return _products(e, k), _products(e if f is None else f, v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g_k: Tensor, g_v: Tensor):
        e, f, k, v = ctx.saved_tensors
        of_k, of_v, d_e = ctx.needs_input_grad[2], ctx.needs_input_grad[3], None
        dk = _products(e.mT, g_k) if of_k else None
        dv = _products((e if f is None else f).mT, g_v) if of_v else None
        d_f = torch.zeros_like(f) if f is not None and ctx.needs_input_grad[1] else None
        if ctx.needs_input_grad[0]:
            d_e = _add_products(torch.zeros_like(e), g_k, k)
            d_e = d_e if f is not None else _add_products(d_e, g_v, v)
        return d_e, None if d_f is None else _add_products(d_f, g_v, v), dk, dv


def _products(matrix: Tensor, x: Tensor) -> Tensor:
    """matrix [Hkv or 1, a, b] times x [B, Hkv, b, D] → [B, Hkv, a, D]"""
    out = x.new_empty(*x.shape[:2], matrix.shape[1], x.shape[3])
    for text, to in zip(x, out, strict=True):
        torch.bmm(matrix.expand(len(text), -1, -1), text, out=to)
    return out


def _add_products(matrix: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """matrix [Hkv or 1, r, T] plus grad [B, Hkv, r, D] times x [B, Hkv, T, D], transposed; over all heads if there is
    one matrix."""
    for g, text in zip(grad, x, strict=True):
        if len(matrix) == len(text):
            matrix.baddbmm_(g, text.mT)
            continue
        for head in range(len(text)):
            matrix[0].addmm_(g[head], text[head].mT)
    return matrix
