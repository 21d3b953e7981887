"""A transformers KV cache in which every KV head keeps only the tokens inside its span.

    model.generate(ids, past_key_values=SpanCache(model))

Each layer is a `HeadCache`: a ring for each key/value head, and the sink tokens beside it; heads with a linear state
beyond their span also have that (far_cache.py). `update` returns the new
keys unchanged, with an attribute that names their layer of the cache; the attention function then attends
through that layer, and passes it the padding of the new tokens.

Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, D and Dv head sizes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from spanformer.hf.attention import HELD, Seen, attend_seen
from spanformer.hf.far import far_of, refuse_far
from spanformer.hf.far_cache import FarState
from spanformer.hf.padding import Read, reorder
from spanformer.hf.spans import HeadSpans, cache_bytes, head_spans
from spanformer.memory import HeadCache
from spanformer.ops import Rule
from spanformer.ops.decode.codes import Bits, check_bits

GROWTH = 256  # tokens: a ring shorter than its span grows by at least this many, or by an eighth
TAKEN_BACK = 64  # tokens that assisted decoding may crop


class SpanCache(Cache):
    """For a model with spans attached: pass it to generate() or forward as past_key_values.

    context: total number of tokens, if known: memory is then allocated once, and no more than needed.
    slack: how many tokens `crop` can remove once a ring is full. Assisted decoding sets 64.
    bits: 8 or 4 stores keys and values in as many bits; 0 in the model's dtype.
    """

    def __init__(self, model: nn.Module, *, context: int = 0, slack: int = 0, bits: Bits = 0) -> None:
        for name, number in (("context", context), ("slack", slack)):
            if number < 0:
                raise ValueError(f"{name} is {number}; expected a number of tokens, at least 0")
        check_bits(bits)
        named = head_spans(model)
        places = [getattr(model.get_submodule(name), "layer_idx", None) for name in named]
        if sorted(p for p in places if p is not None) != list(range(len(named))):
            raise ValueError(
                f"{type(model).__name__} has attention layers with indices {places}; a SpanCache needs one layer for "
                "each "
                "index, so use the model's default cache"
            )
        spans = dict(zip(places, named.values(), strict=True))
        super().__init__(layers=[SpanLayer(spans[n], context, slack, bits) for n in range(len(named))])
        self._model = model

    def crop(self, tokens_to_remove: int) -> None:
        """Remove this many last tokens, given as a negative number, padding included; in all layers or in none."""
        for layer in self.layers:
            layer.check_crop(tokens_to_remove)  # type: ignore[attr-defined]
        super().crop(tokens_to_remove)

    def bytes(self) -> int:
        """The exact number of bytes allocated for keys, values and linear states."""
        return sum(layer.bytes() for layer in self.layers)  # type: ignore[attr-defined]

    def full_bytes(self) -> int:
        """Bytes that a KV cache of all tokens so far would take."""
        first = self.layers[0]
        assert isinstance(first, SpanLayer)
        if not first.is_initialized:
            return 0
        return cache_bytes(self._model, first.length, batch=first.batch_size, dtype=first.dtype)[1]


class SpanLayer(CacheLayerMixin):
    """One layer's keys and values. `length` counts tokens as transformers does, padding included."""

    is_croppable = True
    is_sliding = False

    def __init__(self, spans: HeadSpans, context: int = 0, slack: int = 0, bits: Bits = 0) -> None:
        super().__init__()
        self.spans, self.context, self.slack = spans, context, slack
        self.bits: Bits = bits
        self.length = 0
        self.room = 0
        """the longest text so far: rings are allocated only this long, less the sink tokens beside them"""
        self.rings: HeadCache | None = None
        self.far: FarState | None = None
        self.tokens = Read()
        """which tokens are not padding: the rings hold only these"""
        self._rule: tuple[tuple, Rule] | None = None

    # ---- called by transformers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self._widths = key_states.shape[3], value_states.shape[3]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object):
        """Return the new keys and values unchanged; an attribute of the keys names this layer for the attention
        function."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.length != self.tokens.length:
            raise ValueError(
                "the last tokens were read by a model that does not attend through this cache; expected a "
                "model with spans attached"
            )
        self.length += key_states.shape[2]
        setattr(key_states, HELD, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        self.slack = max(self.slack, TAKEN_BACK)
        if self.rings is not None:
            self.rings.resize(self.rings.reach, self.slack)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise if `crop` could not remove this many tokens."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was given {tokens_to_remove}; expected a negative number, minus the number of tokens to remove"
            )
        if self.rings is not None:
            self.rings.check_crop(self.rings.seen - self.tokens.last(-tokens_to_remove))

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if self.rings is not None and tokens_to_remove:
            self.rings.crop(self.rings.seen - self.tokens.last(-tokens_to_remove))
            self.tokens.drop(-tokens_to_remove)
            self.length += tokens_to_remove

    def reset(self) -> None:
        self.tokens = Read()
        self.rings, self.far, self.room, self.length, self.is_initialized = None, None, 0, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._take_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            self._take_rows(torch.arange(self.batch_size)[indices.cpu()])

    def offload(self) -> None:
        raise ValueError("a SpanCache does not support offloading to the CPU; leave it on its device")

    prefetch = offload

    # ---- called by the attention function

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float | None, s_aux: Tensor | None) -> Tensor:
        """q [B, H, T, D] over the stored keys and the new k [B, Hkv, T, D] and v [B, Hkv, T, Dv], which it stores."""
        t = q.shape[2]
        if self.rings is None:
            self.dtype = k.dtype  # autocast may have changed it
        packed = seen.packed if seen.real is not None else None
        if self.rings is None and self.length == t:  # start of a text: all keys are here
            out = attend_seen(q, k, v, seen, self.spans, 0.0, scale, s_aux)
            rings = self._rings(t)
            self.tokens.add(t, None if packed is None else seen.real)
            if packed is not None:
                k, v = (reorder(x, packed[0]) for x in (k, v))
            rings.append(k, v, None if packed is None else packed[2])
            if self.far is not None:
                self.far.start(k, v, rings.place, self.slack)
            return out
        if torch.is_grad_enabled() and q.requires_grad:
            raise ValueError("a SpanCache has no gradients; use torch.no_grad(), or no KV cache")
        rings, rule = self._rings(t), self.rule(s_aux, t)
        self.tokens.add(t, None if packed is None else seen.real)
        if packed is None:
            return self._attend(rings, q, k, v, rule, None, scale)
        order, back, lengths = packed
        q, k, v = (reorder(x, order) for x in (q, k, v))
        return reorder(self._attend(rings, q, k, v, rule, lengths, scale), back)

    def _attend(
        self, rings: HeadCache, q: Tensor, k: Tensor, v: Tensor, rule: Rule, lengths: Tensor | None,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        if self.far is None:
            return rings.attend(q, k, v, rule, lengths=lengths, scale=scale).out
        refuse_far(0.0, rule.sink_logits)
        place, block = rings.place.clone(), self.far.block(rings, k, v, self.slack)
        near = rings.attend(q, k, v, rule, lengths=lengths, scale=scale)
        out = self.far.attend(near, q, block, place)
        self.far.join(block, rings.place, self.slack)
        return out

    def store(self, k: Tensor, v: Tensor) -> None:
        """Keep k [B, Hkv, T, D] and v [B, Hkv, T, Dv] of the next tokens, whose layer no query reads: they left the
        model's layers before this one."""
        self.update(k, v)
        rings = self._rings(k.shape[2])
        self.tokens.add(k.shape[2], None)
        rings.append(k, v)

    def rule(self, s_aux: Tensor | None, new: int) -> Rule:
        """The same object while nothing changes, so that HeadCache can reuse what it prepared. new: how many tokens
        are read; spans that grow depend on their positions."""
        assert self.rings is not None
        elastic = self.spans.elastic()
        sink = None if s_aux is None else (id(s_aux), s_aux._version)
        state = (self.spans.change(), self.room, sink)
        if elastic or self._rule is None or self._rule[0] != state:
            positions = self.rings.place[:, None] + torch.arange(new) if elastic else None
            rule = self.spans.rule(positions=positions)
            assert rule.reach is not None and rule.span is not None
            shared = self.spans.heads // self.spans.groups
            held = torch.tensor([n for n in self.rings.reach for _ in range(shared)])
            reach = torch.as_tensor(rule.reach).minimum(held)
            span = rule.span.detach()
            self._rule = (
                state,
                replace(rule, reach=reach, span=span, sink_logits=None if s_aux is None else s_aux.detach()),
            )
        return self._rule[1]

    def bytes(self) -> int:
        return (0 if self.rings is None else self.rings.bytes()) + (0 if self.far is None else self.far.bytes())

    def _rings(self, new: int) -> HeadCache:
        """Make room for this many more tokens, with the current spans."""
        change = self.spans.change()
        if self.length <= self.room and self._made_for == change:
            assert self.rings is not None
            return self.rings
        if self.length > self.room:
            exact = self.room == 0 and self.context >= self.length
            self.room = (
                self.context if exact else self.length + (0 if self.room == 0 else max(GROWTH, self.length // 8))
            )
        if self.far is not None and self._made_for != change:
            raise ValueError(
                "the spans have changed since this cache read its text, and linear states cannot give tokens back; "
                "make a new SpanCache"
            )
        keeps, far = self.spans.keeps(self.room), far_of(self.spans)
        reach = [min(n, self._longest) for n in keeps]
        self._made_for = change
        if self.rings is None:
            if far is not None:
                self.far = FarState(self.spans, far, self.batch_size, self.dtype, self.device)
            self.rings = HeadCache(
                self.batch_size, reach, *self._widths, sink_tokens=self.spans.sink_tokens, slack=self.slack,
                bits=self.bits, dtype=self.dtype, device=self.device,
            )  # fmt: skip
        else:
            self.rings.resize(reach)
        return self.rings

    _made_for: tuple[int, ...] | None = None

    @property
    def _longest(self) -> int:
        return max(1, self.room - self.spans.sink_tokens)

    def _take_rows(self, index: Tensor) -> None:
        if self.rings is not None:
            self.rings = self.rings.rows(index)
            self.far = None if self.far is None else self.far.rows(index)
            self.tokens.rows(index)
            self.batch_size = len(index)
