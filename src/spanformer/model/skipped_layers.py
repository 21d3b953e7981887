"""Keys and values of a token in all the layers that it skips, by one product.

    norm_n(x) = g_n · x / rms(x), so  W_n norm_n(x) = (W_n diag(g_n)) · x / rms(x)

The norm's weights are part of the matrices, and x / rms(x) is the same for all layers: the matrices of layers n … L are
one matrix. Rotary positions rotate all keys alike. Elsewhere (LayerNorm, positions or steps added at every layer, a
mechanism's own memory, half precision) layers project one after the other.

Shapes: B batch, T tokens, R skipped layers, G key/value heads of size D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.memory import LayerMemory
from spanformer.model.decoding import RingMemory
from spanformer.model.norm import RMSNorm
from spanformer.position.rotary import Rotary

if TYPE_CHECKING:
    from spanformer.model.decoder import Decoder


class SkippedLayers:
    """Of a model that decodes. The stacked matrix is made when it is first needed, and again after weights change."""

    def __init__(self, lm: Decoder) -> None:
        c, position = lm.config, lm.positions()[0]
        self.blocks, self.position = lm.ordered_blocks(), position
        self.usable = c.stack == "residual" and c.order == "pre" and not c.position.per_layer
        norms = [block.norm1 for block in self.blocks]
        self.norms = [norm for norm in norms if isinstance(norm, RMSNorm)]
        self.usable &= len(self.norms) == len(norms)
        self.usable &= isinstance(position, Rotary) or not position.rotates
        self.stamp: list[tuple[int, int, int]] = []
        self.matrix: Tensor | None = None

    def store(self, first: int, x: Tensor, memories: Sequence[LayerMemory]) -> bool:
        """Store the keys and values of x [B, T, dim] in the memories of layers `first`, counted from 0, and later;
        False if that is not possible at once."""
        if isinstance(memory := memories[first], RingMemory) and memory.deferred is not None:
            return True  # they store it when a later token reads it
        rings = [memory for memory in memories[first:] if isinstance(memory, RingMemory) and not memory.cache.notes]
        wide = x.dtype in (torch.float32, torch.float64) and not torch.is_grad_enabled()
        if not self.usable or not wide or len(rings) < len(memories) - first:
            return False
        attention, eps = self.blocks[0].attention, self.norms[0].eps
        groups, size = attention.kv_heads, attention.head_dim
        scale = torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)
        found = F.linear(x * scale, self._stacked()[first:].flatten(0, 1))
        found = found.view(*x.shape[:2], 2 * len(rings) * groups, size).transpose(1, 2)  # [B, 2·R·G, T, D]
        keys, values = found.unflatten(1, (len(rings), 2, groups)).unbind(2)
        encode = rings[0].step.encode(self.position, x.dtype)
        if encode is not None:
            keys = encode(keys[:, 0], keys.flatten(1, 2))[1].view_as(keys)
        for n, ring in enumerate(rings):
            ring.cache.store_tokens(keys[:, n], values[:, n], ring.step.real)
        return True

    def _stacked(self) -> Tensor:
        """[layers, 2·G·D, dim]"""
        linears = [(block.attention.key.weight, block.attention.value.weight) for block in self.blocks]
        parts = [(*both, norm.weight) for both, norm in zip(linears, self.norms, strict=True)]
        stamp = [(id(p), p._version, p.data_ptr()) for part in parts for p in part]
        if self.matrix is None or stamp != self.stamp:
            self.stamp = stamp
            self.matrix = torch.stack([torch.cat([key, value]) * gain for key, value, gain in parts])
        return self.matrix
