"""Gated Delta Networks: Improving Mamba2 with Delta Rule (Yang, Kautz, Hatamizadeh, 2025).
https://arxiv.org/abs/2412.06464

    S_t = a_t S_{t−1} + β_t k_t (v_t − a_t S_{t−1}ᵀ k_t)ᵀ        y_t = S_tᵀ q_t/√D
    β_t = σ(w_β·x_t)        log a_t = −exp(A) softplus(w_a·x_t + b)        q, k, v ← SiLU(conv(q, k, v));  |q| = |k| = 1

A token first lets the whole state fade, then replaces what it holds under its key. The convolution reads `conv` tokens
of each channel, and its last conv − 1 inputs are part of the state.
Shapes: H query heads, Hkv key/value heads, D head size, dim of hidden states.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.matrix_state import MatrixStateAttention, Ready
from spanformer.attention.recurrent import BACKENDS, Tensors
from spanformer.attention.short_convolution import ShortConvolution, next_tail
from spanformer.kinds import HeadSpec
from spanformer.memory import MemoryShape
from spanformer.ops import attend_delta
from spanformer.ops.linear.layer import Convolution, Layer, run_layer
from spanformer.ops.linear.matrix_call import make_call

SHORTEST, LONGEST = 1e-3, 1e-1
"""softplus(b) at the beginning, as Mamba2"""


class GatedDelta(MatrixStateAttention):
    """`conv`: tokens that the convolution reads, the own one included; 0: no convolution."""

    def __init__(self, dim: int, heads: int, head_dim: int, kv_heads: int = 0, *, conv: int = 4) -> None:
        super().__init__(dim, heads, head_dim, kv_heads)
        if conv < 0:
            raise ValueError(f"conv is {conv}; expected at least 1, or 0 for no convolution")
        kv = self.kv_heads
        sizes = {"q": heads, "k": kv, "v": kv} if conv else {}
        self.conv = conv
        self.convolutions = nn.ModuleDict({name: ShortConvolution(n, head_dim, conv) for name, n in sizes.items()})
        self.beta = nn.Parameter(torch.randn(kv, dim) / dim**0.5)
        """[Hkv, dim]: w_β"""
        self.decay = nn.Parameter(torch.randn(kv, dim) / dim**0.5)
        """[Hkv, dim]: w_a"""
        self.log_rate = nn.Parameter((1 + 15 * torch.rand(kv)).log())
        """[Hkv]: A"""
        start = (math.log(SHORTEST) + torch.rand(kv) * math.log(LONGEST / SHORTEST)).exp()
        self.bias = nn.Parameter(start.expm1().log())
        """[Hkv]: b"""

    @classmethod
    def build(cls, spec: HeadSpec) -> GatedDelta:
        return cls(spec.dim, spec.heads, spec.head_dim, spec.kv_heads, conv=spec.p.conv)

    def gate_weights(self) -> list[Tensor]:
        return [self.beta, self.decay]

    def gates(self, found: list[Tensor]) -> Tensors:
        beta, decay = (t.transpose(1, 2) for t in found)
        rate = F.softplus(decay + self.bias.to(decay.dtype)[:, None])
        return {"beta": beta.sigmoid(), "decay": -self.log_rate.to(rate.dtype).exp()[:, None] * rate}

    def query_inputs(self, q: Tensor) -> Tensors:
        return {"q": q} if self.conv > 1 else {}

    def more_inputs(self, shape: MemoryShape) -> Tensors:
        wide = torch.promote_types(shape.dtype, torch.float32)
        beta = torch.zeros(shape.batch, shape.kv_heads, shape.slack, dtype=wide, device=shape.device)
        q = beta.new_zeros(shape.batch, self.heads, shape.slack, shape.head_dim, dtype=shape.dtype)
        return {"beta": beta, "decay": beta.clone()} | self.query_inputs(q)

    def empty_state(self, shape: MemoryShape) -> Tensors:
        state, heads = super().empty_state(shape), {"q": self.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        if self.conv > 1:
            for name, n in heads.items():
                state[name] = state["s"].new_zeros(shape.batch, n, self.conv - 1, shape.head_dim)
        return state

    def prepare(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> Ready:
        wide, carried = state["s"].dtype, {}
        parts = {"q": q.to(wide), "k": inputs["k"].to(wide), "v": inputs["v"].to(wide)}
        for name, convolve in self.convolutions.items():
            tail = state.get(name, parts[name][:, :, :0])
            parts[name], carried[name] = convolve(parts[name], tail, padding, documents)
        q, k, v = (F.silu(t) for t in parts.values())
        q, k = (F.normalize(t, dim=3, eps=1e-6) for t in (q, k))
        return Ready(q, k, v, carried if self.conv > 1 else {})

    def run_fused(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensors] | None:
        parts = {"q": q, "k": inputs["k"], "v": inputs["v"]}
        if self.conv:
            weights = tuple(self.convolutions[name].weight for name in parts)
        else:
            weights = tuple(t.new_ones(t.shape[1], t.shape[3], 1) for t in parts.values())
        tails = tuple(state[name] for name in parts) if self.conv > 1 else None
        call = make_call(
            q, inputs["k"], inputs["v"], inputs["beta"], inputs["decay"], state["s"], documents=documents, padding=None
        )
        layer = Layer(inputs["out_gate"], self.norm, self.eps, Convolution(weights, tails, padding))  # pyright: ignore
        found = run_layer(call, layer, BACKENDS[self.backend])
        if found is None or tails is None:
            return found and (found[0], {"s": found[1]})
        after = {name: next_tail(t, state[name], padding, documents) for name, t in parts.items()}
        return found[0], {"s": found[1]} | after

    def operate(
        self, ready: Ready, inputs: Tensors, state: Tensor | None, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return attend_delta(
            ready.q, ready.k, ready.v, inputs["beta"], inputs["decay"], state, padding=padding, documents=documents,
            backend=BACKENDS[self.backend],
        )  # fmt: skip

    def extra_repr(self) -> str:
        return super().extra_repr() + f", conv={self.conv}"
