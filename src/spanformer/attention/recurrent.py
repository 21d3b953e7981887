"""The base of linear attention: heads whose past is a sum of fixed size instead of keys and values.

    out_i = Σ_{j ≤ i} w_ij v_j / Σ_{j ≤ i} w_ij        w_ij = e^(G_i − G_j) φ(q_i)·φ(k_j)        G: summed log-decay

so a layer remembers Σ_j e^(−G_j) φ(k_j) v_jᵀ and Σ_j e^(−G_j) φ(k_j), up to e^G. A mechanism gives φ and the decay.
Shapes: B batch, H query heads, Hkv key/value heads, T tokens, D and Dv head sizes, m features.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from spanformer.attention.base import Attention, View, adds_rule, full_precision, given_terms
from spanformer.attention.recomputed import attend_again, serves
from spanformer.kinds import POSITIONS
from spanformer.memory import MemoryShape, Recurrent, empty_rows
from spanformer.ops import AnyRule, Attended, Divide, LinearState, Rule, attend_linear
from spanformer.ops.linear.call import BY_SUM

Tensors = dict[str, Tensor]
BACKENDS = {"auto": "auto", "native": "native", "reference": "reference"}
BACKENDS |= dict.fromkeys(("triton", "flex", "banded"), "portable")
"""of `attend_linear`, by the backend of `attend` that a model is set to"""
MOST_FEATURES = 1 << 16
"""a state has D + 1 numbers for each, and random ones are drawn on the CPU"""
TERMS = ("heads", "causal", "documents", "key_bias")
"""of a rule: documents and padding, which `view` holds, too"""
ABSOLUTE = ", ".join(name for name, kind in POSITIONS.items() if kind.absolute)
"""position encodings that are added to the embeddings"""


class KeyFeatures(NamedTuple):
    """φ of the keys, and what else a state needs."""

    b: Tensor
    """[B, Hkv, T, m]"""
    decay: Tensor | None = None
    """[1 or B, Hkv, 1 or T], log; at most 0"""
    peak: Tensor | None = None
    """[B, Hkv, T]: φ(k_j) is e^(peak_j) b_j"""


class RecurrentAttention(Attention):
    """`features`: m. Without weights there is nothing to drop: `dropout` must be 0."""

    def __init__(self, heads: int, features: int, kv_heads: int = 0, *, causal: bool = True) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        if heads < 1 or features < 1 or heads % kv_heads:
            raise ValueError(
                f"heads is {heads}, features {features} and kv_heads {kv_heads}; expected at least 1 each, and heads a "
                "multiple of kv_heads"
            )
        if features > MOST_FEATURES:
            raise ValueError(f"there are {features} features; expected at most {MOST_FEATURES:,}")
        self.heads, self.features, self.kv_heads, self.causal = heads, features, kv_heads, causal
        self.stores_features = False
        """φ(q) and φ(k) are larger than q and k: long texts make them again in the backward pass"""

    def query_features(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """q [B, H, T, D] → a [B, H, T, m], and peak [B, H, T] where φ(q) is e^peak a."""
        raise NotImplementedError(f"{type(self).__name__} has no features; override query_features")

    def key_features(
        self, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> KeyFeatures:
        """Of what `token_inputs` returned; arguments as in `run`."""
        raise NotImplementedError(f"{type(self).__name__} has no features; override key_features")

    def divide(self) -> Divide:
        """What sums of weighted values are divided by."""
        return BY_SUM

    def combine(
        self, a: Tensor, keys: KeyFeatures, v: Tensor, state: LinearState | None, padding: Tensor | None,
        documents: Tensor | None,
    ) -> tuple[Attended, LinearState]:  # fmt: skip
        """The output [B, H, T, Dv] of a [B, H, T, m], keys and v [B, Hkv, T, Dv], and the state after them."""
        return attend_linear(
            a, keys.b, v, keys.decay, state, causal=self.causal, padding=padding, documents=documents,
            divide=self.divide(), backend=BACKENDS[self.backend],
        )  # fmt: skip

    # ---- what `Recurrent` asks for

    def token_inputs(self, k: Tensor, v: Tensor, view: View) -> Tensors:
        return {"k": k, "v": v}

    def query_inputs(self, q: Tensor) -> Tensors:
        return {}

    def run(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Attended, Tensors]:
        with full_precision(q.device):
            if self.stores_features and padding is None and documents is None and serves(self, q, inputs):
                found, after, peak = attend_again(self, q, inputs, state, self.divide())
                return found, {"s": after.s, "z": after.z} | ({} if peak is None else {"peak": peak})
            a, query_peak = self.query_features(q)
            keys = self.key_features(inputs, state, padding, documents)
            before = LinearState(state["s"], state["z"]) if self.causal and state else None
            found, after = self.combine(a, keys, inputs["v"].to(a.dtype), before, padding, documents)
        lse = found.lse if query_peak is None else found.lse + query_peak
        carried = {"s": after.s, "z": after.z} if self.causal else {}
        if keys.peak is not None:
            lse = lse + keys.peak.repeat_interleave(self.heads // self.kv_heads, 1)
            carried |= {"peak": keys.peak[:, :, -1]} if self.causal else {}
        return Attended(found.out.to(q.dtype), lse), carried

    def advance(self, inputs: Tensors, state: Tensors, padding: Tensor) -> Tensors:
        keys, wide = self.key_features(inputs, state, padding, None), state["s"].dtype
        b, v = (t.to(wide).masked_fill(padding[:, None, :, None], 0) for t in (keys.b, inputs["v"]))
        kept = b.new_ones(b.shape[:2])
        if keys.decay is not None:
            decay = keys.decay.double().expand(b.shape[:3]).masked_fill(padding[:, None], 0)
            after = decay.sum(2, keepdim=True) - decay.cumsum(2)
            b, kept = b * after.exp().to(wide)[..., None], decay.sum(2).exp().to(wide)
        s = kept[..., None, None] * state["s"] + b.transpose(2, 3) @ v
        found = {"s": s, "z": kept[..., None] * state["z"] + b.sum(2)}
        return found if keys.peak is None else found | {"peak": keys.peak[:, :, -1]}

    def reset(self, state: Tensors, rows: Tensor) -> Tensors:
        return empty_rows(state, rows, peak=-torch.inf)

    def new_memory(self, shape: MemoryShape) -> Recurrent:
        if shape.in_place and (said := self.advice()):  # a KV cache is made: once for a text, and not in training
            raise ValueError(said)
        kept = (shape.batch, shape.kv_heads, shape.slack)
        k, v = (torch.zeros(*kept, shape.head_dim, dtype=shape.dtype, device=shape.device) for _ in range(2))
        inputs = {"k": k, "v": v} | self.more_inputs(shape)
        return Recurrent.start(self, shape, self.empty_state(shape) if self.causal else {}, inputs)

    def empty_state(self, shape: MemoryShape) -> Tensors:
        wide = torch.promote_types(shape.dtype, torch.float32)
        s = torch.zeros(shape.batch, shape.kv_heads, self.features, shape.head_dim, dtype=wide, device=shape.device)
        return {"s": s, "z": s.new_zeros(s.shape[:3])}

    def more_inputs(self, shape: MemoryShape) -> Tensors:
        """Zeros [B, Hkv, slack, …] for each tensor that `token_inputs` returns beside k and v."""
        return {}

    # ---- what a layer asks for

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if not adds_rule(position):
            return []
        return [f"{unsupported_position(self)}: a sum over the past has no scores to add to; use {ABSOLUTE} or rotary"]

    def rule(self, view: View | None = None) -> Rule:
        return _rule(self.heads, self.causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """A whole text, without a state before it."""
        if others := [name for name in given_terms(rule, view, TERMS) if name != "documents"]:
            raise ValueError(f"{', '.join(others)} was given; {type(self).__name__} has no scores to apply it to")
        documents = view.documents[1] if isinstance(view.documents, tuple) else view.documents
        shape = MemoryShape(len(k), k.shape[1], v.shape[3], dtype=q.dtype, device=q.device)
        state = self.empty_state(shape) if self.causal else {}
        inputs = self.token_inputs(k, v, view) | self.query_inputs(q)
        return self.run(q, inputs, state, view.padding, documents)[0]

    def pair_weights(self, q: Tensor, inputs: Tensors, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        """[B, H, T, T] what each pair of a text counts in the output: for pictures of short texts."""
        b, kv_heads, tokens = inputs["v"].shape[:3]
        ones = torch.eye(tokens, dtype=q.dtype, device=q.device).expand(b, kv_heads, -1, -1)
        shape = MemoryShape(b, kv_heads, tokens, dtype=q.dtype, device=q.device)
        state = self.empty_state(shape) if self.causal else {}
        return type(self).run(self, q, inputs | {"v": ones}, state, padding, documents)[0].out

    def advice(self) -> str | None:
        """Gates that are not finite would make every later token NaN."""
        for name, p in self.named_parameters():
            if p.device.type != "meta" and not bool(p.detach().isfinite().all()):
                return (
                    f"{type(self).__name__}.{name} holds numbers that are not finite, and every output would be NaN; "
                    "go back to an earlier checkpoint, with a lower learning rate or gradients clipped"
                )
        return None

    def context_length(self) -> list[int]:
        """No key of an earlier token is needed: the state has them all."""
        return [0] * self.heads

    def mean_context(self) -> list[int]:
        """A state costs as many operations as a window of m keys, and that is what reports count."""
        return [self.features] * self.heads

    def extra_repr(self) -> str:
        return f"heads={self.heads}, features={self.features}" + ("" if self.causal else ", causal=False")


@functools.cache
def _rule(heads: int, causal: bool) -> Rule:
    """The same object for every token that is decoded."""
    return Rule(heads, causal=causal)


def unsupported_position(mechanism: Attention) -> str:
    """The beginning of a refusal; the same for all encodings that a mechanism refuses, as a table lists it once."""
    return f"{type(mechanism).__name__} does not support this position encoding"
