"""Gated Linear Attention Transformers with Hardware-Efficient Training (Yang et al., 2024).
https://arxiv.org/abs/2312.06635

    S_t = diag(α_t) S_{t−1} + k_t v_tᵀ        α_t = σ(W₂ W₁ x_t + b)^(1/τ)        y_t = S_tᵀ q_t/√D

Each channel of the keys forgets at its own pace, which every token sets. The root τ = 16 begins with gates near 1, and
W₂ W₁ has rank 16. Shapes: Hkv key/value heads, D head size, dim of hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.base import wide_linear
from spanformer.attention.matrix_state import MatrixStateAttention, Ready
from spanformer.attention.recurrent import BACKENDS, Tensors
from spanformer.kinds import HeadSpec
from spanformer.memory import MemoryShape
from spanformer.ops import attend_gated
from spanformer.ops.linear.layer import Layer, run_layer
from spanformer.ops.linear.matrix_call import make_call

TAU = 16.0


class GatedLinear(MatrixStateAttention):
    """`rank` of the gates' projection."""

    def __init__(self, dim: int, heads: int, head_dim: int, kv_heads: int = 0, *, rank: int = 16) -> None:
        super().__init__(dim, heads, head_dim, kv_heads)
        if rank < 1:
            raise ValueError(f"rank is {rank}; expected at least 1")
        self.rank = rank
        self.down = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        """[rank, dim]: W₁"""
        self.up = nn.Parameter(torch.randn(self.kv_heads * head_dim, rank) / rank**0.5)
        """[Hkv · D, rank]: W₂"""
        self.bias = nn.Parameter(torch.zeros(self.kv_heads * head_dim))
        """[Hkv · D]: b"""

    @classmethod
    def build(cls, spec: HeadSpec) -> GatedLinear:
        return cls(spec.dim, spec.heads, spec.head_dim, spec.kv_heads, rank=spec.p.rank)

    def gate_weights(self) -> list[Tensor]:
        return [self.down]

    def gates(self, found: list[Tensor]) -> Tensors:
        inner = wide_linear(found[0], self.up, self.bias)
        gates: Tensor = _LogGate.apply(inner)  # pyright: ignore[reportAssignmentType]
        return {"gates": gates.unflatten(2, (self.kv_heads, self.head_dim)).transpose(1, 2)}

    def more_inputs(self, shape: MemoryShape) -> Tensors:
        wide = torch.promote_types(shape.dtype, torch.float32)
        size = (shape.batch, shape.kv_heads, shape.slack, shape.head_dim)
        return {"gates": torch.zeros(size, dtype=wide, device=shape.device)}

    def run_fused(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensors] | None:
        call = make_call(
            q, inputs["k"], inputs["v"], None, inputs["gates"], state["s"], documents=documents, padding=padding
        )
        found = run_layer(call, Layer(inputs["out_gate"], self.norm, self.eps), BACKENDS[self.backend])
        return found and (found[0], {"s": found[1]})

    def operate(
        self, ready: Ready, inputs: Tensors, state: Tensor | None, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return attend_gated(
            ready.q, ready.k, ready.v, inputs["gates"], state, padding=padding, documents=documents,
            backend=BACKENDS[self.backend],
        )  # fmt: skip

    def extra_repr(self) -> str:
        return super().extra_repr() + f", rank={self.rank}"


class _LogGate(torch.autograd.Function):
    """log σ(x)^(1/τ). Its slope (1 − σ(x))/τ follows from the result, so that nothing else is stored."""

    @staticmethod
    def forward(x):
        return F.logsigmoid(x).div_(TAU)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (found,) = ctx.saved_tensors
        return (found * TAU).expm1_().mul_(grad).div_(-TAU)
