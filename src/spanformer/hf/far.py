"""Linear states for what lies beyond the spans of a Hugging Face model: exact near, linear far, one denominator.

    w_ij = m(d)·exp(s_ij) + (1 − m(d))·e^(c_i) φ(q_i)·ψ(k_j)        d = i − j        m(d) = clip((R + z − d) / R, 0, 1)
    out_i = Σ_j w_ij v_j / Σ_j w_ij        φ(q) = softmax(A q + a)        ψ(k) = softmax(B k + b)        c_i = u·q_i + c

It is `span_linear` (attention/span_linear.py) with learned features, as in Hedgehog (Zhang et al., 2024,
https://arxiv.org/abs/2402.04347) and LoLCATs (https://arxiv.org/abs/2410.10254): a frozen model's queries and keys do
not adapt to elu + 1. Softmax features lie in 0 … 1, so a state cannot overflow; c_i, the logarithm of the mass of far
keys, is only ever added to a logarithm. q and k are those of the model's scores: rotated, if it has rotary positions.
Sink tokens are exact at every distance (m = 1) and join no state.

Shapes: B batch, H query heads, Hkv key/value heads, G of them with a state, Tq queries, Tk keys, D and Dv head sizes,
m features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spanformer.attention.base import full_precision
from spanformer.hf.padding import reorder
from spanformer.ops import Attended, attend_far, merge

if TYPE_CHECKING:
    from spanformer.hf.attention import Seen
    from spanformer.hf.spans import HeadSpans

FIRST_MASS = -4.0
"""log of what max_span far keys weigh at first beside one near key of score 0: the model is nearly unchanged"""


class FarMap(nn.Module):
    """Features of one layer's queries and keys, and which key/value heads have a state."""

    def __init__(self, heads: int, kv_heads: int, features: int, key_size: int, value_size: int, max_span: int) -> None:
        super().__init__()
        if isinstance(features, bool) or not isinstance(features, int) or features < 1:
            raise ValueError(f"far_features is {features!r}; expected a whole number of features, at least 1")
        self.heads, self.kv_heads, self.features = heads, kv_heads, features
        self.key_size, self.value_size = key_size, value_size
        # the same directions for queries and keys, so that like finds like; any fixed draw serves
        drawn = torch.randn(kv_heads, features, key_size, generator=torch.Generator().manual_seed(0))
        drawn *= 0.5 * key_size**-0.25
        self.key_weight = nn.Parameter(drawn.clone())
        self.key_bias = nn.Parameter(torch.zeros(kv_heads, features))
        self.query_weight = nn.Parameter(drawn.repeat_interleave(heads // kv_heads, 0))
        self.query_bias = nn.Parameter(torch.zeros(heads, features))
        self.mass_weight = nn.Parameter(torch.zeros(heads, key_size))
        """[H, D]: u"""
        self.mass_bias = nn.Parameter(torch.full((heads,), FIRST_MASS + math.log(features / max_span)))
        """[H]: c"""
        self.register_buffer("on", torch.ones(kv_heads, dtype=torch.bool))
        """[Hkv] which key/value heads have a state"""
        self._read: tuple[tuple[int, int], list[int]] | None = None

    on: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FarMap:
        super()._apply(fn, recurse)
        self._read = None  # it was read before the move
        return self

    def kv_on(self) -> list[int]:
        """The key/value heads that have a state."""
        change = (id(self.on), self.on._version)
        if self._read is None or self._read[0] != change:
            self._read = (change, [g for g, has in enumerate(self.on.tolist()) if has])
        return self._read[1]

    def heads_on(self) -> list[int]:
        """Their query heads."""
        shared = self.heads // self.kv_heads
        return [g * shared + n for g in self.kv_on() for n in range(shared)]

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the states of one text beside keys of this dtype: float32, unless the keys are wider."""
        wide = torch.promote_types(dtype, torch.float32)
        return len(self.kv_on()) * self.features * (self.value_size + 1) * wide.itemsize

    def of_queries(self, q: Tensor, heads: list[int]) -> tuple[Tensor, Tensor]:
        """φ(q) [B, n, Tq, m] and c [B, n, Tq] of q [B, n, Tq, D], the queries of `heads`."""
        with full_precision(q.device):
            q = q.to(torch.promote_types(q.dtype, torch.float32))
            weight, bias = self.query_weight[heads].to(q.dtype), self.query_bias[heads].to(q.dtype)
            mass = (q * self.mass_weight[heads][:, None].to(q.dtype)).sum(-1)
            features = (q @ weight.transpose(1, 2) + bias[:, None]).softmax(-1)
            return features, mass + self.mass_bias[heads][:, None].to(q.dtype)

    def of_keys(self, k: Tensor) -> Tensor:
        """ψ(k) [B, G, Tk, m] of k [B, G, Tk, D], the keys of the heads with a state."""
        with full_precision(k.device):
            k = k.to(torch.promote_types(k.dtype, torch.float32))
            weight, bias = (t[self.kv_on()].to(k.dtype) for t in (self.key_weight, self.key_bias))
            return (k @ weight.transpose(1, 2) + bias[:, None]).softmax(-1)

    def extra_repr(self) -> str:
        return f"features={self.features}, states={len(self.kv_on())} of {self.kv_heads}"


def far_of(spans: HeadSpans) -> FarMap | None:
    """The layer's features if any of its heads has a state."""
    far = spans.far
    return far if far is not None and far.kv_on() else None


def attend_beyond(far: FarMap, spans: HeadSpans, near: Attended, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> Tensor:
    """[B, H, Tq, Dv]: near, the exact attention of q [B, H, Tq, D], and the states of k and v [B, Hkv, Tk, ·]."""
    heads, kv_heads = far.heads_on(), far.kv_on()
    out, lse = near.out[:, heads], near.lse[:, heads]
    q, k, v = q[:, heads], k[:, kv_heads], v[:, kv_heads]
    at = torch.arange(seen.keys, device=k.device)[None] if seen.k_positions is None else seen.k_positions
    hidden, back = (at < spans.sink_tokens).expand(len(k), -1), None
    if seen.bias is not None:  # padding has no position: it goes before all real tokens
        shown = seen.bias[:, 0] == 0
        order, newest = (t.int().argsort(dim=1, stable=True) for t in (shown, shown[:, seen.keys - q.shape[2] :]))
        k, v, hidden = reorder(k, order), reorder(v, order), (hidden | ~shown).gather(1, order)
        q, out, lse = reorder(q, newest), reorder(out, newest), reorder(lse[..., None], newest)[..., 0]
        back = newest.argsort(dim=1)
    found = far_part(far, spans, q, k, v, hidden, seen.documents)
    wide = found.out.dtype
    joined = merge([Attended(out.to(wide), lse.to(wide)), found]).out
    joined = joined if back is None else reorder(joined, back)
    if len(heads) == far.heads:
        return joined.to(near.out.dtype)
    return near.out.index_copy(1, torch.tensor(heads, device=q.device), joined.to(near.out.dtype))


def far_part(
    far: FarMap, spans: HeadSpans, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, documents: Tensor | None = None
) -> Attended:
    """The states alone, for the heads that have one: q [B, H, Tq, D], k and v [B, G, Tk, ·]. hidden [B, Tk] bool: keys
    that join no state."""
    heads = far.heads_on()
    features, mass = far.of_queries(q, heads)
    wide = features.dtype
    with full_precision(q.device):
        found = attend_far(
            features, far.of_keys(k), v.to(wide), spans.span_tokens()[heads].to(wide), spans.ramp, documents=documents,
            padding=hidden,
        )  # fmt: skip
    return Attended(found.out, found.lse + mass)


def refuse_far(dropout: float, s_aux: Tensor | None) -> None:
    """Raise for arguments that a layer with states does not support."""
    if dropout:
        raise ValueError(f"attention dropout is {dropout:g}; heads with linear states support none: set it to 0")
    if s_aux is not None:
        raise ValueError(
            "this model has learned sink logits (s_aux), which linear states do not support; use no states"
        )
