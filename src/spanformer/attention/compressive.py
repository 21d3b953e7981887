"""Compressive Transformers for Long-Range Sequence Modelling (Rae et al., 2019). https://arxiv.org/abs/1911.05507

    block b sees itself, the `memory` tokens before it, and `slots` compressed ones c_g = f(x_{gc}, …, x_{gc + c − 1})
    loss += mean ‖attn(h, old) − attn(h, f(old))‖²        or, autoencode, mean ‖old − g(f(old))‖²

h is the block, old the block that it pushes out of the memory; attn has no positions and no mask. Only f (and g) get a
gradient from this loss, and none from the language model's: states, queries and projections count as constants there, f
here. The paper places compressed slots by their index; here a slot has the position of its tokens, so that every
position encoding knows its age. With `learned`, heads learn spans over these ages, and only heads whose span is longer
than the memory compress.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, n slots of a block, D head size, dim of hidden states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import Attention, View
from spanformer.attention.compressor import Compressor
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, Project
from spanformer.memory.block_layout import BlockSizes, Layout
from spanformer.memory.compressed import Compressed
from spanformer.ops import AnyRule, Attended, Rule, attend


class Compressive(Attention):
    """span: learned spans of the heads, over the ages of tokens and slots."""

    def __init__(
        self, heads: int, dim: int, *, block: int = 128, memory: int = 128, slots: int = 128, ratio: int = 4,
        compress: str = "conv", loss: str = "attention", span: AdaptiveSpan | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check(block, memory, slots, ratio)
        self.heads, self.dim, self.block, self.memory, self.slots, self.ratio = heads, dim, block, memory, slots, ratio
        self.causal, self.span, self.most_used = True, span, compress == "most_used"
        self.compressor = Compressor(dim, ratio, "mean" if self.most_used else compress, loss)

    @classmethod
    def build(cls, spec: HeadSpec) -> Compressive:
        p, section = spec.p, spec.section
        span = None
        if p.learned:
            reach = p.block + p.memory + p.ratio * p.slots
            span = AdaptiveSpan(
                spec.heads, min(reach, section.max_span), ramp=section.ramp, init=section.init,
                penalty=section.penalty, kv_heads=spec.tied_spans,
            )  # fmt: skip
        return cls(
            spec.heads, spec.dim, block=p.block, memory=p.memory, slots=p.slots, ratio=p.ratio, compress=p.compress,
            loss=p.loss, span=span,
        )  # fmt: skip

    @property
    def reach(self) -> int:
        """Distances that the last token of a block sees."""
        return self.block + self.memory + self.ratio * self.slots

    @property
    def learns_to_compress(self) -> bool:
        return self.training and self.compressor.learns

    def rule(self, view: View | None = None) -> Rule:
        return Rule(self.heads) if self.span is None else self.span.rule(view)

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        found = None if self.span is None else self.span.penalty(rule, view)
        if self.learns_to_compress:  # 0, also while no block has left: distributed training waits for all gradients
            nothing = torch.stack([p.sum() for p in self.compressor.parameters()]).sum() * 0
            found = nothing if found is None else found + nothing
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """What a piece of a block sees, at the positions of the view (memory/compressed.py). Without positions, a text
        that the memory holds exactly."""
        if view.q_positions is None and k.shape[2] > self.memory + self.block:
            raise ValueError(
                f"k has {k.shape[2]} tokens and no memory; expected at most {self.memory + self.block}, since older "
                "ones are compressed before they are projected: run a layer of a model instead"
            )
        return super().forward(q, k, v, rule, view)

    # ---- compression

    def compress(self, old: Tensor) -> Tensor:
        """[B, block, dim] → [B, n, dim]"""
        return self.compressor(old)

    def compression_loss(self, q: Tensor, old: Tensor, present: Tensor, new: Tensor, project: Project) -> Tensor:
        """q [B, H, T, D] of the newest block, old [B, block, dim], which of it is there, and new [B, n, dim], the only
        one with a gradient. project: the layer's projections as constants."""
        if self.compressor.loss == "autoencode":
            found, true = self.compressor.rebuild(new), old
            wrong = (found - true).square().mean(2).masked_fill(~present, 0)
            return wrong.sum() / present.sum().clamp(min=1)
        hidden = torch.zeros(present.shape, dtype=q.dtype, device=q.device).masked_fill(~present, -math.inf)[:, None]
        with torch.no_grad():
            true = attend(q, *project(old, None), Rule(self.heads, causal=False, key_bias=hidden), backend=self.backend)
        empty = ~present.view(len(old), -1, self.ratio).any(2)
        hidden = torch.zeros(empty.shape, dtype=q.dtype, device=q.device).masked_fill(empty, -math.inf)[:, None]
        rule = Rule(self.heads, causal=False, key_bias=hidden)
        return (attend(q, *project(new, None), rule, backend=self.backend).out - true.out).square().mean()

    def auxiliary_parameters(self) -> list[nn.Parameter]:
        return list(self.compressor.parameters())

    # ---- what a layer asks for

    def new_memory(self, shape: MemoryShape) -> Compressed:
        if self.most_used and shape.slack:
            raise ValueError(
                f"slack is {shape.slack}; compress='most_used' counts how often tokens are attended to, and cannot "
                "take tokens back: use slack 0"
            )
        sizes = BlockSizes(
            self.dim, self.block, self.memory, self.slots, self.ratio, self.most_used, self.far_heads(shape.kv_heads)
        )
        return Compressed(Layout(shape, sizes))

    def far_heads(self, kv_heads: int) -> tuple[int, ...]:
        """Key/value heads whose queries see further back than the memory."""
        context, shared = self.context_length(), self.heads // kv_heads
        return tuple(g for g in range(kv_heads) if max(context[g * shared : (g + 1) * shared]) > self.memory)

    def context_length(self) -> list[int]:
        if self.span is None:
            return [self.reach - 1] * self.heads
        return [min(n, self.reach - 1) for n in self.span.context_length()]

    def mean_context(self) -> list[int]:
        """Keys: half of the own block, the memory, and slots."""
        own = self.block // 2 + self.memory
        return [min(n + 1, own) + max(0, n + 1 - own) // self.ratio for n in self.context_length()]

    def spans(self) -> list[float | None]:
        return super().spans() if self.span is None else self.span.spans()

    def after_step(self) -> None:
        if self.span is not None:
            self.span.after_step()

    def extra_repr(self) -> str:
        sizes = f"block={self.block}, memory={self.memory}, slots={self.slots}, ratio={self.ratio}"
        return f"heads={self.heads}, {sizes}" + (", most_used" if self.most_used else "")


MOST_RATIO = 1 << 10
"""tokens of a slot: a convolution has dim² numbers for each"""


def _check(block: int, memory: int, slots: int, ratio: int) -> None:
    if not 1 <= ratio <= MOST_RATIO:
        raise ValueError(f"ratio is {ratio}; expected 1 … {MOST_RATIO:,} tokens of a slot")
    if block % ratio:
        raise ValueError(f"ratio is {ratio} and block {block}; expected a ratio that divides block")
    if memory % block:
        raise ValueError(
            f"memory is {memory} and block {block}; expected a multiple of block: blocks leave the memory whole"
        )
    if slots % (block // ratio):
        raise ValueError(
            f"slots is {slots}; expected a multiple of block/ratio, {block // ratio}: the slots of a block leave "
            "together"
        )
