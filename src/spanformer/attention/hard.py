"""Hard attention: each query takes the value of one key instead of a mean (Show, Attend and Tell; Xu et al., 2015).
https://arxiv.org/abs/1502.03044

    p_ij = softmax_j(s_ij)        out_i = v_{j_i},  j_i = argmax_j s_ij, of equal scores the later key
    straight-through    the gradient of Σ_j (e_ij + p_ij − sg(p_ij)) v_j, e the one-hot choice, sg without gradient
                        (Bengio, Léonard, Courville, 2013), https://arxiv.org/abs/1308.3432
    sampled             j_i drawn by p_i in training, and ∂s_i = (L_i − b_i) ∂log p_{i j_i}: the score function
                        (Williams, 1992), https://doi.org/10.1007/BF00992696

L_i is the part of the loss that follows the choice: of the targets from query i on, or of all in an encoder. The
baseline b_i is the running mean of a target's loss, times their number; it depends on no choice of this step, so the
gradient stays unbiased. Evaluation and decoding take the best key.
Shapes: B batch, H heads, T queries, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from spanformer.attention.base import Attention, Choices, View, one_rule, own_output
from spanformer.attention.cross import Cross
from spanformer.attention.full import build as build_full
from spanformer.attention.wrapper import Wrapper
from spanformer.core.recompute import recomputing
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape, OwnMemory
from spanformer.memory.key_ring import KeyRing, RingSizes
from spanformer.ops import AnyRule, Attended
from spanformer.ops.hard import attend_one
from spanformer.ops.lower import make_call

DECAY = 0.9
"""of the baseline's running mean, per backward pass"""


class Hard(Wrapper):
    """The best key by `inner`'s rule. `sampled`: learn by the score function instead of straight through. Its loss
    must be told before the backward pass (`TransformerStack.learn_from`), as `spanformer train` does."""

    baseline: Tensor
    """[2]: the running mean of a target's loss, and the weight behind it"""

    def __init__(self, inner: Attention, *, sampled: bool = False) -> None:
        super().__init__(inner)
        self.sampled = sampled
        if sampled:
            self.register_buffer("baseline", torch.zeros(2))
        self._advantage: Tensor | None = None  # [B, T or 1]
        self._noted: list[Tensor] = []  # of the last forward pass: entropy, and the gradient's square [B, T]
        self._variance: Tensor | None = None

    @classmethod
    def wrap(cls, inner: Attention, head_dim: int) -> Hard:
        return cls(inner)

    @classmethod
    def wrap_sampled(cls, inner: Attention, head_dim: int) -> Hard:
        return cls(inner, sampled=True)

    @classmethod
    def build(cls, spec: HeadSpec) -> Hard:
        return cls(build_full(spec), sampled=spec.kind == "hard_sampled")

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        reasons = self.inner.supports(position=position)
        if persistent:
            reasons.append("hard attention sees one key, so it shares no softmax with persistent vectors; use none")
        return [*reasons, *([] if self.causal else own_output(self, cache=cache, mixed=mixed))]

    def new_memory(self, shape: MemoryShape) -> OwnMemory | None:
        if not self.causal:
            return None
        return KeyRing(shape, RingSizes(self.inner.context_length()[0] + 1, 0))

    def context_length(self) -> list[int]:
        """No earlier hidden states: `KeyRing` remembers what it needs."""
        return [0] * self.heads if self.causal else self.inner.context_length()

    def mean_context(self) -> list[int]:
        return self.inner.mean_context()

    def codes(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:2], 0)

    def among(self, q: Tensor, k: Tensor, v: Tensor, codes: Tensor, rule: AnyRule, view: View) -> Attended:
        rule = one_rule(rule + view.rule(rule.heads, causal=rule.causal), "hard attention")
        if self.dropout and self.training:
            raise ValueError(
                f"model.attention.dropout is {self.dropout}, and hard attention has no weights to drop; set it to 0, "
                "and feedforward.dropout or embedding.dropout instead"
            )
        call = make_call(q, k, v, rule, q_positions=view.q_positions, k_positions=view.k_positions)
        learns = torch.is_grad_enabled()
        draws = self.sampled and self.training
        found = attend_one(call, sample=draws, soft=learns and not self.sampled, weights=self.training)
        out = found.out
        if self.training and found.entropy is not None and found.spread is not None and not recomputing():
            self._noted, self._advantage = [found.entropy.detach().mean(), found.spread.detach().sum(1)], None
        if draws and learns and found.log_p is not None:
            out = _WithReward.apply(out, found.log_p, self)
        return Attended(out, found.score)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """lse is the score of the chosen key, without a gradient."""
        return self.among(q, k, v, self.codes(q[:, 0]), rule, view)

    @torch.no_grad()
    def learn_from(self, nll: Tensor, weight: Tensor) -> None:
        if not (self.sampled and self.training and self._noted):
            return
        loss = nll.detach().to(self.baseline.dtype) * weight
        mean = self.baseline[0] / self.baseline[1].clamp(min=1e-9)
        each = _following(loss) - mean * _following(weight)
        ordered = self.causal or isinstance(self.inner, Cross)
        self._advantage = each if ordered else each[:, :1]
        self._variance = (self._advantage.square() * self._noted[1]).mean()
        self.baseline.lerp_(torch.stack([loss.sum() / weight.sum().clamp(min=1e-9), torch.ones_like(mean)]), 1 - DECAY)

    def choices(self) -> Choices | None:
        if not self._noted:
            return None
        variance = math.nan if self._variance is None else float(self._variance)
        return Choices(float(self._noted[0]) / math.log(2), variance)

    def extra_repr(self) -> str:
        return f"sampled={self.sampled}"


def _following(x: Tensor) -> Tensor:
    """[B, T] the sum from each token on."""
    return x.flip(1).cumsum(1).flip(1)


class _WithReward(torch.autograd.Function):
    """out as it is; log_p [B, H, T] gets the advantage of its query as gradient, whatever the gradient of out is."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, log_p: Tensor, mechanism: Hard) -> Tensor:
        ctx.mechanism, ctx.like = mechanism, (log_p.shape, log_p.dtype)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        advantage, (shape, dtype) = ctx.mechanism._advantage, ctx.like
        if advantage is None:
            raise ValueError(
                "hard_sampled learns by the loss, which it was not told; call model.learn_from(nll, weight) before "
                "the backward pass"
            )
        return grads[0], advantage[:, None].expand(shape).to(dtype), None
