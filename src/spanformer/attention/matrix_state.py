"""The base of heads with a matrix state and no normaliser: the gated delta rule and gated linear attention.

    y_t = S_tᵀ q_t/√D        out_t = rms_norm(y_t) ⊙ w ⊙ SiLU(W_g x_t)

A mechanism says how S changes; the norm per head stands in the place of a sum of weights.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D head size, dim of hidden states x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.base import View, adds_rule, full_precision, key_states, rotates, wide_linear
from spanformer.attention.recurrent import ABSOLUTE, RecurrentAttention, Tensors, unsupported_position
from spanformer.memory import MemoryShape
from spanformer.ops import Attended

EPS = 1e-6


class Ready(NamedTuple):
    """What the operation takes."""

    q: Tensor
    """[B, H, T, D]"""
    k: Tensor
    """[B, Hkv, T, D]"""
    v: Tensor
    """[B, Hkv, T, D]"""
    carried: Tensors
    """what the state holds beside s, after these tokens"""


class MatrixStateAttention(RecurrentAttention):
    """Causal. A mechanism has `gates` of the hidden states, `prepare` and `operate`."""

    def __init__(self, dim: int, heads: int, head_dim: int, kv_heads: int = 0) -> None:
        super().__init__(heads, head_dim, kv_heads)
        if dim < 1:
            raise ValueError(f"dim is {dim}; expected the size of hidden states, at least 1")
        self.dim, self.head_dim = dim, head_dim
        self.out_gate = nn.Parameter(torch.randn(heads * head_dim, dim) / dim**0.5)
        """[H · D, dim]: W_g"""
        self.norm = nn.Parameter(torch.ones(head_dim))
        """[D]: w"""

    def gate_weights(self) -> list[Tensor]:
        """[rows, dim] each, which hidden states are multiplied with."""
        raise NotImplementedError(f"{type(self).__name__} has no gates; override gate_weights and gates")

    def gates(self, found: list[Tensor]) -> Tensors:
        """Of the products [B, T, rows] with `gate_weights`: [B, Hkv, T, …] each, in float32 or wider."""
        raise NotImplementedError(f"{type(self).__name__} has no gates; override gate_weights and gates")

    def prepare(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> Ready:
        """q, k and v as the operation takes them; arguments as in `run`."""
        return Ready(q, inputs["k"], inputs["v"], {})

    def operate(
        self, ready: Ready, inputs: Tensors, state: Tensor | None, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """√D y [B, H, T, D] and the state after the last token."""
        raise NotImplementedError(f"{type(self).__name__} has no operation; override operate")

    def run_fused(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensors] | None:
        """out and the state after these tokens by one pass of the kernel; None where that is not possible."""
        raise NotImplementedError(f"{type(self).__name__} has no fused pass; override run_fused")

    # ---- what `Recurrent` asks for

    def token_inputs(self, k: Tensor, v: Tensor, view: View) -> Tensors:
        x, weights = key_states(view, self.dim), [self.out_gate, *self.gate_weights()]
        found = wide_linear(x, torch.cat(weights) if len(weights) > 1 else self.out_gate)  # one product reads x once
        gate, *others = found.split([len(w) for w in weights], 2)
        gate = gate.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
        return {"k": k, "v": v, "out_gate": gate} | self.gates(others)  # a state needs no out_gate: `crop` does without

    def run(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Attended, Tensors]:
        with full_precision(q.device):
            fused = self.run_fused(q, inputs, state, padding, documents)
            if fused is None:
                ready = self.prepare(q, inputs, state, padding, documents)
                found, after = self.operate(ready, inputs, state["s"], padding, documents)
                wide = found.to(torch.promote_types(found.dtype, torch.float32))
                out = F.rms_norm(wide, wide.shape[3:], self.norm.to(wide.dtype), self.eps) * F.silu(inputs["out_gate"])
                fused = out.to(q.dtype), {"s": after} | ready.carried
        out, after = fused
        lse = torch.zeros((), dtype=torch.promote_types(out.dtype, torch.float32), device=out.device)
        return Attended(out, lse.expand(out.shape[:3])), after

    @property
    def eps(self) -> float:
        """Of √D y, the norm of which is the one of y: so q need not be divided."""
        return EPS * self.head_dim

    def advance(self, inputs: Tensors, state: Tensors, padding: Tensor) -> Tensors:
        k = inputs["k"]
        q = inputs.get("q", k.repeat_interleave(self.heads // self.kv_heads, 1))  # they change no s
        with full_precision(k.device):
            ready = self.prepare(q, inputs, state, padding, None)
            return {"s": self.operate(ready, inputs, state["s"], padding, None)[1]} | ready.carried

    def empty_state(self, shape: MemoryShape) -> Tensors:
        wide = torch.promote_types(shape.dtype, torch.float32)
        size = (shape.batch, shape.kv_heads, shape.head_dim, shape.head_dim)
        return {"s": torch.zeros(size, dtype=wide, device=shape.device)}

    def pair_weights(self, q: Tensor, inputs: Tensors, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        """With signs, divided by the sum of their sizes. y is linear in the values."""
        shape = MemoryShape(len(q), self.kv_heads, self.head_dim, dtype=q.dtype, device=q.device)
        ready = self.prepare(q, inputs, self.empty_state(shape), padding, documents)
        ones = torch.eye(q.shape[2], dtype=ready.k.dtype, device=q.device).expand(*ready.k.shape[:3], -1)
        found, _ = self.operate(ready._replace(v=ones), inputs, None, padding, documents)
        return found / found.abs().sum(3, keepdim=True).clamp(min=EPS)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        name, reasons = type(self).__name__, []
        if rotates(position) or adds_rule(position):
            why = "its gates change channels one by one and there are no scores to add to"
            reasons.append(f"{unsupported_position(self)}: {why}; use {ABSOLUTE}")
        if persistent:
            reasons.append(
                f"model.persistent is set, and {name} has no sum of weights for learned vectors to join; set it to 0"
            )
        return reasons
