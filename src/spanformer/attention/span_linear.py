"""Exact attention within a learned span, linear attention beyond it, under one denominator.

    w_ij = m(d)·exp(s_ij) + (1 − m(d))·e^c φ(q_i)·φ(k_j)        d = i − j        m(d) = clip((R + z − d) / R, 0, 1)
    out_i = Σ_j w_ij v_j / Σ_j w_ij        φ(x) = elu(x) + 1        loss += λ · mean(z)

z is the span of Sukhbaatar et al. (2019), https://arxiv.org/abs/1905.07799, φ the features of Katharopoulos et al.
(2020), https://arxiv.org/abs/2006.16236; c is a learned logarithm per head, since φ·φ and exp have no common scale. At
z = S every key is exact, at z = −R none is. The gradient of z compares exact and linear weights on the ramp, so the
penalty shortens a span where the state already serves.
A head stores its newest keys and values, as many as it sees exactly, and a state of D·(D + 1) numbers for all others.
Shapes: B batch, H query heads, Hkv key/value heads, T new tokens, n stored ones, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spanformer.attention.adaptive_span import AdaptiveSpan
from spanformer.attention.base import Attention, View, adds_rule, full_precision
from spanformer.attention.dynamic_span import DynamicSpan, first_bias
from spanformer.attention.recurrent import ABSOLUTE, BACKENDS, RecurrentAttention, Tensors, unsupported_position
from spanformer.kinds import HeadSpec
from spanformer.memory import MemoryShape, Recurrent, empty_rows
from spanformer.memory.groups import group_heads
from spanformer.ops import AnyRule, Attended, LinearState, Rule, attend, attend_far, merge

FIRST_SCALE = -4.0
"""log of what S far keys weigh at first beside one near key; with more, they drown the near ones (docs/LOG.md)"""


class Border(AdaptiveSpan):
    """A span that may be set as low as −R, where no key is exact. Training clamps it to [0, S] as any other span: at −R
    no pair is on the ramp, and a span that got there would have no gradient to leave."""

    def __init__(
        self, heads: int, max_span: int, *, ramp: float = 32, init: float = 0.0, penalty: float = 2e-6,
        kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(heads, max_span, ramp=ramp, init=init, penalty=penalty, kv_heads=kv_heads)
        self.shortest = -self.ramp

    @torch.no_grad()
    def after_step(self) -> None:
        self.ratio.clamp_(0, 1)

    def _tokens(self) -> Tensor:
        return super()._tokens().clamp(min=-self.ramp)  # a share of max_span is rounded

    def context_length(self) -> list[int]:
        return [max(n, 0) for n in super().context_length()]


class SpanLinear(RecurrentAttention):
    """border: a `Border`, or a `DynamicSpan` for a span per token."""

    def __init__(self, border: Border | DynamicSpan, head_dim: int, kv_heads: int = 0) -> None:
        super().__init__(border.heads, head_dim, kv_heads)
        self.border, self.head_dim = border, head_dim
        self.far_scale = nn.Parameter(torch.full((self.heads,), FIRST_SCALE - math.log(head_dim * border.max_span)))
        """[H]: c. φ·φ is about D where exp(s) is about 1, and the state holds S keys and many more"""

    @classmethod
    def build(cls, spec: HeadSpec) -> SpanLinear:
        given, section = spec.p, spec.section
        if given.dynamic:
            border = DynamicSpan(
                spec.dim, spec.heads, given.max_span, ramp=given.ramp, init=first_bias(section.init),
                penalty=section.penalty, kv_heads=spec.tied_spans,
            )  # fmt: skip
        else:
            border = Border(
                spec.heads, given.max_span, ramp=given.ramp, init=section.init, penalty=section.penalty,
                kv_heads=spec.tied_spans,
            )  # fmt: skip
        return cls(border, spec.head_dim, spec.kv_heads)

    def supports(
        self, *, position: object | None = None, cache: bool = False, mixed: bool = False, persistent: bool = False
    ) -> list[str]:
        if not adds_rule(position):
            return []
        return [f"{unsupported_position(self)}: its state has no distances; use {ABSOLUTE} or rotary"]

    def rule(self, view: View) -> Rule:
        return self.border.rule(view)

    def penalty(self, rule: AnyRule, view: View) -> Tensor | None:
        return self.border.penalty(rule, view)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rule: AnyRule, view: View) -> Attended:
        """A whole text, without a state before it."""
        documents = view.documents[1] if isinstance(view.documents, tuple) else view.documents
        hidden = None if view.padding is None else view.padding[:, None]
        near = Attention.forward(self, q, k, v, rule, view)
        return self._with_far(near, q, k, v, self._spans(rule), list(range(self.heads)), None, documents, hidden)

    def _spans(self, rule: AnyRule) -> Tensor:
        """[H] or [B, H, T]"""
        assert isinstance(rule, Rule) and rule.span is not None
        return rule.span

    def _with_far(
        self, near: Attended, q: Tensor, k: Tensor, v: Tensor, spans: Tensor, heads: list[int],
        state: LinearState | None, documents: Tensor | None, hidden: Tensor | None,
    ) -> Attended:  # fmt: skip
        """near: exact attention of the queries of `heads`. hidden [B, 1 or Hkv, T]: keys that are not there."""
        with full_precision(q.device):
            wide = torch.promote_types(q.dtype, torch.float32)
            far = attend_far(
                q.to(wide), k.to(wide), v.to(wide), spans, self.border.ramp, state, documents=documents,
                padding=hidden, elu=True, backend=BACKENDS[self.backend],
            )  # fmt: skip
            lse = far.lse + self.far_scale.to(wide)[heads][:, None]
        return merge([near, Attended(far.out.to(near.out.dtype), lse.to(near.lse.dtype))])

    # ---- what `Recurrent` asks for

    def token_inputs(self, k: Tensor, v: Tensor, view: View) -> Tensors:
        inputs = {"k": k, "v": v}
        if isinstance(self.border, DynamicSpan):
            assert view.x is not None
            spans = self.border.spans_of(view.x).unflatten(1, (self.kv_heads, -1))
            inputs["spans"] = spans.transpose(2, 3)  # [B, Hkv, T, H / Hkv]
        return inputs

    def run(
        self, q: Tensor, inputs: Tensors, state: Tensors, padding: Tensor | None, documents: Tensor | None
    ) -> tuple[Attended, Tensors]:
        shared = self.heads // self.kv_heads
        rule = self._rule(inputs)
        parts, order = [], []
        for kv_heads, need in group_heads([state[f"k{g}"].shape[1] for g in range(self.kv_heads)], 1 << 62, q.device):
            heads = [g * shared + n for g in kv_heads for n in range(shared)]
            k, v, hidden = self._stored(state, inputs, kv_heads, need, padding)
            ids = None if documents is None else torch.cat([documents[:, :1].expand(-1, need), documents], 1)
            mine = rule.for_heads(heads, kv_heads)
            pair = None if ids is None or documents is None else (documents, ids)
            shown = torch.zeros(hidden.shape, device=q.device).masked_fill(hidden, -math.inf)
            seen = mine + Rule(len(heads), key_bias=shown, documents=pair)
            near = attend(q[:, heads], k, v, seen, backend=self.backend)
            before = LinearState(state["s"][:, kv_heads], state["z"][:, kv_heads])
            parts.append(self._with_far(near, q[:, heads], k, v, self._spans(mine), heads, before, ids, hidden))
            order += heads
        back = sorted(range(self.heads), key=order.__getitem__)
        found = Attended(*(torch.cat(each, 1)[:, back] for each in zip(*parts, strict=True)))
        if documents is not None:  # earlier documents have ended: their tokens join no state
            ended = documents != documents[:, -1:]
            padding = ended if padding is None else padding | ended
            state = self.reset(state, ended[:, 0])
        return found, self.advance(inputs, state, padding)

    def _rule(self, inputs: Tensors) -> Rule:
        if "spans" not in inputs:
            return self.border.rule(View())
        spans = inputs["spans"].transpose(2, 3).flatten(1, 2)
        return Rule(self.heads, span=spans, ramp=self.border.ramp)

    def _stored(
        self, state: Tensors, inputs: Tensors, kv_heads: list[int], need: int, padding: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [B, heads, need + T, D] of stored and new tokens, and which of them are not there."""

        def joined(name: str) -> Tensor:
            stored = [F.pad(t, (0, 0, need - t.shape[1], 0)) for t in (state[f"{name}{g}"] for g in kv_heads)]
            return torch.cat([torch.stack(stored, 1).to(inputs[name].dtype), inputs[name][:, kv_heads]], 2)

        absent = [F.pad(t, (need - t.shape[1], 0), value=True) for t in (state[f"absent{g}"] for g in kv_heads)]
        fresh = torch.zeros_like(inputs["k"][:, 0, :, 0], dtype=torch.bool) if padding is None else padding
        hidden = torch.cat([torch.stack(absent, 1), fresh[:, None].expand(-1, len(kv_heads), -1)], 2)
        return joined("k"), joined("v"), hidden

    @torch.no_grad()
    def advance(self, inputs: Tensors, state: Tensors, padding: Tensor | None) -> Tensors:
        """The newest tokens of each head stay stored; what leaves joins the state. None: nothing is padding."""
        new = inputs["k"].shape[2]
        if padding is None and all(n >= new and state[f"k{g}"].shape[1] == n for g, n in enumerate(self._lengths())):
            return self._shift(inputs, state, new)
        fresh = torch.zeros_like(inputs["k"][:, 0, :, 0], dtype=torch.bool) if padding is None else padding
        found, lengths = {"s": state["s"].clone(), "z": state["z"].clone()}, self._lengths()
        for g in range(self.kv_heads):
            absent = torch.cat([state[f"absent{g}"], fresh], 1)
            k, v = (torch.cat([state[f"{name}{g}"], inputs[name][:, g].to(state["s"].dtype)], 1) for name in "kv")
            if padding is not None:
                order = absent.logical_not().to(torch.int8).argsort(dim=1, stable=True)
                absent, (k, v) = absent.gather(1, order), (t.gather(1, order[..., None].expand_as(t)) for t in (k, v))
            leaves = k.shape[1] - lengths[g]
            if leaves < 0:  # the span has grown; tokens that have joined the state stay there
                k, v = (F.pad(t, (0, 0, -leaves, 0)) for t in (k, v))
                absent, leaves = F.pad(absent, (-leaves, 0), value=True), 0
            b = (F.elu(k[:, :leaves]) + 1).masked_fill(absent[:, :leaves, None], 0)
            found["s"][:, g] += b.transpose(1, 2) @ v[:, :leaves].masked_fill(absent[:, :leaves, None], 0)
            found["z"][:, g] += b.sum(1)
            found |= {f"k{g}": k[:, leaves:].clone(), f"v{g}": v[:, leaves:].clone()}
            found[f"absent{g}"] = absent[:, leaves:].clone()
        return found

    def _shift(self, inputs: Tensors, state: Tensors, new: int) -> Tensors:
        """`advance` by tokens none of which is padding, where every head lets go of as many: all heads at once."""
        heads, wide = range(self.kv_heads), state["s"].dtype
        fresh = {name: inputs[name].to(wide).unbind(1) for name in "kv"}
        fresh["absent"] = (torch.zeros_like(state["absent0"][:, :new]),) * self.kv_heads
        k, v, gone = (torch.stack([state[f"{name}{g}"][:, :new] for g in heads], 1) for name in ("k", "v", "absent"))
        b = (F.elu(k) + 1).masked_fill(gone[..., None], 0)
        found = {"s": state["s"] + b.mT @ v.masked_fill(gone[..., None], 0), "z": state["z"] + b.sum(2)}
        for name, tokens in fresh.items():
            found |= {f"{name}{g}": torch.cat([state[f"{name}{g}"][:, new:], tokens[g]], 1) for g in heads}
        return found

    def reset(self, state: Tensors, rows: Tensor) -> Tensors:
        return empty_rows(state, rows, **{f"absent{g}": 1.0 for g in range(self.kv_heads)})

    def _lengths(self) -> list[int]:
        """[Hkv] how many earlier tokens each key/value head stores."""
        shared, context = self.heads // self.kv_heads, self.border.context_length()
        return [max(context[h : h + shared]) for h in range(0, self.heads, shared)]

    def new_memory(self, shape: MemoryShape) -> Recurrent:
        wide = torch.promote_types(shape.dtype, torch.float32)
        s = torch.zeros(shape.batch, shape.kv_heads, shape.head_dim, shape.head_dim, dtype=wide, device=shape.device)
        state = {"s": s, "z": s.new_zeros(s.shape[:3])}
        if shape.kv_heads == self.kv_heads:
            for g, n in enumerate(self._lengths()):
                state |= {f"{name}{g}": s.new_zeros(shape.batch, n, shape.head_dim) for name in "kv"}
                state[f"absent{g}"] = torch.ones(shape.batch, n, dtype=torch.bool, device=shape.device)
        kept = (shape.batch, shape.kv_heads, shape.slack)
        inputs = {name: s.new_zeros(*kept, shape.head_dim, dtype=shape.dtype) for name in "kv"}
        if isinstance(self.border, DynamicSpan):
            inputs["spans"] = s.new_zeros(*kept, self.heads // shape.kv_heads)
        return Recurrent.start(self, shape, state, inputs)

    # ---- what a layer asks for

    def pair_weights(self, q: Tensor, inputs: Tensors, padding: Tensor | None, documents: Tensor | None) -> Tensor:
        ones = torch.eye(q.shape[2], dtype=q.dtype, device=q.device).expand(*inputs["v"].shape[:3], -1)
        view = View(padding=padding, documents=documents)
        return SpanLinear.forward(self, q, inputs["k"], ones, self._rule(inputs), view).out

    def mean_context(self) -> list[int]:
        """What a head sees exactly, and the state, which costs as much as D keys."""
        return [n + self.head_dim for n in self.border.mean_context()]

    def spans(self) -> list[float | None]:
        return self.border.spans()

    def after_step(self) -> None:
        self.border.after_step()
