"""The learned spans of one attention layer of a Hugging Face model, and the tokens its heads keep in the KV cache.

With ratio ρ, max_span S and ramp R, a head weighs a key at distance d by m = clip((ρ·S + R − d) / R, 0, 1): a ramp
centred on z = ρ·S + R/2. It sees ⌈z + R/2⌉ tokens, at most S, and the text's first `sink_tokens`:
these are in its KV cache. At ρ = 1 every key within S has weight 1. With `far` some heads also have a linear state for
what lies beyond (far.py).

A span may grow with the text: for a query that is the n-th token, ρ·S + b·(max(n, S/2) − S) takes the place of ρ·S,
with b from 0 (fixed) to 1 (unlimited: such a head sees everything). As b ≤ 1, a key that a head no longer sees never
returns.

Shapes: H query heads, Hkv key/value heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from spanformer.attention.adaptive_span import AdaptiveSpan, read_spans
from spanformer.hf.far import FarMap, far_of
from spanformer.ops import Rule
from spanformer.ops.decode.codes import RECENT, Bits, vector_bytes
from spanformer.ops.rule import UNLIMITED

NO_SINK = -1e4
"""a sink logit that takes up no weight, in float16 too"""
EVERYTHING = float(1 << 30)
"""a span beyond any text"""
NAME = "spans"
"""the attribute of an attention module that holds its spans: model.layers.3.self_attn.spans.ratio"""


class HeadSpans(AdaptiveSpan):
    """One learned span per key/value head (per="kv_head") or per query head. `ratio` [Hkv] or [H] is z's share of S.

    window: the layer's own sliding window, None for none. It still applies, and such a layer keeps no
    sink_tokens: it never saw tokens beyond its window.
    far: features for linear states beyond the spans, None for none.
    sink_logits: each query head has a learned logit without a value in its softmax.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        max_span: int,
        *,
        ramp: float,
        init: float,
        per: str,
        sink_tokens: int,
        window: int | None = None,
        head_size: int = 0,
        far: FarMap | None = None,
        sink_logits: bool = False,
    ) -> None:
        super().__init__(
            heads, max_span, ramp=ramp, init=init, penalty=0.0, kv_heads=kv_heads if per == "kv_head" else None
        )
        self.groups, self.window = kv_heads, window
        self.sink_tokens = 0 if window is not None else sink_tokens
        self.head_size = head_size
        """numbers per token and key/value head, key and value together"""
        self._still: tuple[tuple[int, ...], Rule, float] | None = None
        self.growth: Tensor
        self.register_buffer("growth", torch.zeros(self.kv_heads))
        """[Hkv] or [H], as the ratios: b"""
        self._grown: tuple[tuple[int, int], list[float]] = ((0, 0), [])
        self.far = far
        self.sink_logits = nn.Parameter(torch.full((heads,), NO_SINK)) if sink_logits else None
        """[H]"""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadSpans:
        """`.to`, `.bfloat16` and the like call this. It moves ratios, but never below float32: 8 bits for thousands of
        tokens would change the span."""

        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return (
                moved if moved.dtype.itemsize >= t.dtype.itemsize or moved.dtype.itemsize >= 4 else t.to(moved.device)
            )

        super()._apply(move, recurse)
        self._read, self._grown, self._still = ((0, 0), []), ((0, 0), []), None  # all were read before the move
        return self

    def rule(self, view: object = None, positions: Tensor | None = None) -> Rule:
        """positions [1 or B, Tq]: of the queries in their texts; needed if spans grow (`elastic`)."""
        longest = self._longest()
        reach = longest[0] if len(set(longest)) == 1 else [n for n in longest for _ in range(self.heads // self.groups)]
        span = self._spans()
        if any(self.growths()) or self.growth.requires_grad:
            grown = self.growth.repeat_interleave(self.heads // self.kv_heads)
            if self.elastic():
                if positions is None:
                    raise ValueError("positions are missing; spans that grow with the text need those of the queries")
                grown = grown[:, None]
                length = (positions.to(span.device)[:, None] + 1).clamp(min=self.grows_from)
                more = (length - self.max_span).to(span.dtype)
                span = (span[:, None] + grown * more).clamp(min=0)
            if not self.growth.requires_grad:
                span = torch.where(grown >= 1, EVERYTHING, span)
        return Rule(self.heads, span=span, ramp=self.ramp, reach=reach, sink_tokens=self.sink_tokens)

    def rule_for(self, keys: int, positions: Tensor | None = None) -> Rule:
        """The rule for a call over this many keys. Without gradients it is cached until the spans change,
        and terms that have no effect on so few keys are left out."""
        if (torch.is_grad_enabled() and self.ratio.requires_grad) or torch.compiler.is_compiling() or self.elastic():
            return self.rule(positions=positions)
        if self._still is None or self._still[0] != self.change():
            rule, known = self.rule(), self._read[0] == self._change()
            on_host = known or self.ratio.device.type == "cpu"  # a forward pass must not make the host wait
            shortest = min(self.tokens()) - self.ramp if on_host else -1.0
            self._still = (self.change(), rule, shortest)
        _, rule, shortest = self._still
        if keys <= shortest + 1 and keys <= min(rule.reach_list()):
            return replace(rule, span=None, reach=None, sink_tokens=0)
        return rule

    def growths(self) -> list[float]:
        """b of each ratio."""
        change = id(self.growth), self.growth._version
        if self._grown[0] != change:
            self._grown = change, self.growth.detach().tolist()
        return self._grown[1]

    @property
    def grows_from(self) -> int:
        """tokens of a text below which spans have the length that they have there: a line through later lengths would
        leave nothing at the beginning"""
        return self.max_span // 2

    def elastic(self) -> bool:
        """Whether the span of any head depends on the position of the query."""
        return self.growth.requires_grad or any(0 < b < 1 for b in self.growths())

    def tokens(self, length: int | None = None) -> list[float]:
        """z + R/2 of each ratio at the end of a text of this many tokens (None: of S), the tokens it sees, not yet
        rounded."""
        read_spans([self])
        length = self.max_span if length is None else length
        more = max(length, self.grows_from) - self.max_span
        return [
            float(max(1, length - self.sink_tokens)) if b >= 1 else max(0.0, z + b * more) + self.ramp
            for z, b in zip(self._read[1], self.growths(), strict=True)
        ]

    def keeps(self, length: int | None = None) -> list[int]:
        """[Hkv] how many of the latest tokens each key/value head keeps of a text of this many tokens (None: of S),
        without sink_tokens; a group keeps as many as its longest head."""
        seen = [math.ceil(t) for t in self.tokens(length)]
        each = len(seen) // self.groups
        return [min(most, max(seen[g * each : (g + 1) * each])) for g, most in enumerate(self._longest())]

    def token_bytes(self, bits: int) -> int:
        """Bytes of one token's key and value, of equal sizes, in one KV head's cache of this many bits a number."""
        value = self.head_size // 2
        return vector_bytes(self.head_size - value, bits) + vector_bytes(value, bits)

    def change(self) -> tuple[int, ...]:
        """Another value after each change of the ratios and growths, or of which heads have a state."""
        return (*self._change(), id(self.growth), self.growth._version, *(() if self.far is None else self.far.kv_on()))

    def span_tokens(self) -> Tensor:
        """[H]: z, with its gradient."""
        return self._spans()

    def _longest(self) -> list[int]:
        """[Hkv] the most tokens that a key/value head may see exactly. A head with a state sees its whole ramp: a key
        leaves the exact part only where its far weight is 1."""
        if self.window is not None:
            return [min(self.max_span, self.window)] * self.groups
        far = far_of(self)
        with_state = [] if far is None else far.kv_on()
        each = self.kv_heads // self.groups
        grows = [any(self.growths()[g * each : (g + 1) * each]) for g in range(self.groups)]
        return [
            UNLIMITED if grows[g] else self.max_span + (math.ceil(self.ramp) if g in with_state else 0)
            for g in range(self.groups)
        ]

    def extra_repr(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"{super().extra_repr()}, sink_tokens={self.sink_tokens}{window}"


def head_spans(model: nn.Module) -> dict[str, HeadSpans]:
    """Every layer's spans by the name of its attention module, in order. PEFT's active copy replaces a module."""
    found: dict[str, HeadSpans] = {}
    for name, module in model.named_modules():
        if NAME in module._modules:
            spans = unwrap(module._modules[NAME])
            if isinstance(spans, HeadSpans):
                found[name] = spans
    if not found:
        raise ValueError(f"{type(model).__name__} has no spans; call spanformer.hf.attach on it first")
    read_spans(list(found.values()))  # with one device sync
    return found


def unwrap(spans: object) -> object:
    """PEFT (modules_to_save) wraps a module beside the copy that is trained; the active copy counts."""
    copies = getattr(spans, "modules_to_save", None)
    if copies is None:
        return spans
    if getattr(spans, "disable_adapters", False) or spans.active_adapter not in copies:  # type: ignore[attr-defined]
        return spans.original_module  # type: ignore[attr-defined]
    return copies[spans.active_adapter]  # type: ignore[attr-defined]


def span_penalty(model: nn.Module, weight: float) -> Tensor:
    """weight · Σ_layers S · mean_h ρ_h, as in the paper: a scalar to add to the loss."""
    layers = head_spans(model).values()
    return weight * torch.stack([layer.max_span * layer.ratio.float().mean() for layer in layers]).sum()


def clamp_spans(model: nn.Module) -> None:
    """Clamp every ratio to 0 … 1. Call it after each optimiser step."""
    for layer in head_spans(model).values():
        layer.after_step()


def cache_bytes(
    model: nn.Module, context: int, *, batch: int = 1, dtype: torch.dtype | None = None, bits: Bits = 0
) -> tuple[int, int]:
    """(bytes that the heads keep of a context of this many tokens, bytes of all of it), keys and values together. The
    linear states are among the first, in float32 whatever the dtype.

    dtype: of the KV cache; default: the model's. bits: 8 or 4 of each number that the heads keep, as `SpanCache` has.
    """
    dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    layers = head_spans(model).values()
    kept = sum(
        min(context, n + s.sink_tokens) * s.token_bytes(bits or 8 * dtype.itemsize)
        for s in layers
        for n in s.keeps(context)
    )
    if bits == 4:
        kept += recent_bytes(list(layers))
    full = sum(context * s.groups * s.head_size for s in layers)
    return kept * batch + state_bytes(model, batch=batch, dtype=dtype), full * batch * dtype.itemsize


def recent_bytes(layers: Sequence[HeadSpans]) -> int:
    """Bytes of the newest tokens that a KV cache in 4 bits holds in 8."""
    return sum(s.groups * RECENT * s.token_bytes(8) for s in layers)


def state_bytes(model: nn.Module, *, batch: int = 1, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the linear states beyond the spans, beside keys of this dtype."""
    return batch * sum(s.far.state_bytes(dtype) for s in head_spans(model).values() if s.far is not None)


def check_attach(
    max_span: int | None, init: float, ramp: float, per: str, sink_tokens: int, far_features: int, sink_logits: bool
) -> None:
    """Check the arguments of `attach` that do not depend on the model; AdaptiveSpan checks the rest."""
    if per not in ("kv_head", "head"):
        raise ValueError(f"per is {per!r}; expected 'kv_head' (so that a KV cache can drop tokens) or 'head'")
    if isinstance(sink_tokens, bool) or not isinstance(sink_tokens, int) or sink_tokens < 0:
        raise ValueError(f"sink_tokens is {sink_tokens!r}; expected a number of tokens, at least 0")
    if isinstance(far_features, bool) or not isinstance(far_features, int) or far_features < 0:
        raise ValueError(f"far_features is {far_features!r}; expected a number of features, at least 0 (no states)")
    if far_features and per != "kv_head":
        raise ValueError(f"far_features is {far_features} beside per={per!r}; linear states need per='kv_head'")
    if sink_logits and far_features:
        raise ValueError(f"sink_logits are given beside far_features={far_features}; linear states have none of them")
    if max_span is not None and (isinstance(max_span, bool) or not isinstance(max_span, int)):
        raise ValueError(f"max_span is {max_span!r}; expected a whole number of tokens")


def mean_keeps(layers: Sequence[HeadSpans]) -> float:
    """Tokens a key/value head keeps on average, sink_tokens included."""
    kept = [n + s.sink_tokens for s in layers for n in s.keeps()]
    return sum(kept) / len(kept)
