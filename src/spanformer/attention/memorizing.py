"""Memorizing Transformers (Wu et al., 2022). https://arxiv.org/abs/2203.08913

    s_ij = a_h · q_i·k_j / (‖q_i‖ ‖k_j‖)        P_i: the k largest s_ij among the `memory` tokens before the ring
    gate     out = σ(b_h)·softmax over P_i + (1 − σ(b_h))·softmax over the own block and the ring
    joint    one softmax over both, as in the paper's first version

Both are one merge: by the true lse, or by the learned ones 0 and b_h. Where nothing is retrieved the gate is off. Keys
have unit length, so that keys which older weights made still compare (`unit`); a_h starts at √D, where s is as large as
that of ordinary attention. Retrieved keys have no position and no gradient. The memory may be enlarged after training
(`memory`), and a trained model gets one by `model.retrofit`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.retrieval import Retrieval
from spanformer.kinds import HeadSpec
from spanformer.memory.base import MemoryShape
from spanformer.memory.retrieved import Retrieved
from spanformer.ops import Attended


class Memorizing(Retrieval):
    def __init__(
        self, heads: int, dim: int, *, ring: int = 128, memory: int = 8192, k: int = 32, block: int = 128,
        head_dim: int = 0, gate: bool = True, unit: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(heads, dim, ring=ring, memory=memory, k=k, block=block)
        self.gate = nn.Parameter(torch.zeros(heads)) if gate else None
        """[H]: b, from the paper's σ(b) = 0.5"""
        self.log_scale = nn.Parameter(torch.full((heads,), math.log(head_dim or dim // heads) / 2)) if unit else None
        """[H]: log a"""

    @classmethod
    def build(cls, spec: HeadSpec) -> Memorizing:
        p = spec.p
        return cls(
            spec.heads, spec.dim, ring=p.ring, memory=p.memory, k=p.k, block=p.block, head_dim=spec.head_dim,
            gate=p.weight == "gate", unit=p.unit,
        )  # fmt: skip

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if persistent and self.gate is not None:
            return [
                "Memorizing with a gate cannot share its softmax with persistent vectors; use memorizing(weight=joint)"
            ]
        return []

    def new_memory(self, shape: MemoryShape) -> Retrieved:
        return self._memory(shape, raw=True)

    def query_vectors(self, q: Tensor) -> Tensor:
        if self.log_scale is None:
            return q
        # attention divides by √D
        return F.normalize(q, dim=3) * (self.log_scale.exp() * math.sqrt(q.shape[3])).to(q.dtype)[:, None, None]

    def key_vectors(self, k: Tensor) -> Tensor:
        return k if self.log_scale is None else F.normalize(k, dim=3)

    def combine(self, near: Attended, far: Attended | None, rest: Tensor | None) -> Attended:
        if self.gate is not None:
            near = Attended(near.out, torch.where(near.lse == -math.inf, near.lse, 0))
            if far is not None:
                learned = self.gate.to(far.lse.dtype)[:, None].expand(far.lse.shape)
                far, rest = Attended(far.out, torch.where(far.lse == -math.inf, far.lse, learned)), None
        return super().combine(near, far, rest)

    def advice(self) -> str | None:
        if self.gate is None or not bool((self.gate.detach().sigmoid() < 0.01).all()):
            return None
        return "no head reads its memory (every gate is below 0.01): a smaller learning rate of gates may help"
