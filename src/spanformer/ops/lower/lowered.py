"""The result of lowering: all that a backend or the C kernel receives.

It has no rule. Terms that only some pairs, heads or distances have (a Union, HeadGroups, sink tokens, strides,
forget gates, values by distance) have become separate calls, whose results are merged by lse.

Shapes: B batch, H query heads, Hkv key/value heads, Tq queries, Tk keys, D head size, L entries of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spanformer.ops.blocks import BlockIndex
from spanformer.ops.lower.call import Call, Inputs
from spanformer.ops.rule import list_reach, shorten_by_spans


@dataclass(eq=False)
class Lowered(Inputs):
    """Terms have the same meaning as in `Rule`."""

    causal: bool = True
    shift: int = 0
    """the number subtracted from every distance (1 with paper_compat)"""
    max_future: int = 0
    ramp: float = 32.0
    reach: Tensor | None = None
    """[H] int64 on the CPU"""
    span: Tensor | None = None
    """[H] or [B, H, Tq]"""
    distance_bias: Tensor | None = None
    """[H, L]"""
    distance_vec: Tensor | None = None
    """[1 or H, L, D]"""
    distance_scale: Tensor | None = None
    """[H, L]"""
    key_bias: Tensor | None = None
    """[1 or B, 1 or Hkv or H, Tk]"""
    key_span: Tensor | None = None
    """[1 or B, 1 or H, Tk]"""
    sink_logits: Tensor | None = None
    """[H]"""
    blocks: BlockIndex | None = None
    orders: tuple[Tensor, Tensor] | None = None
    """[E, 1 or B, Tq] and [E, 1 or B, Tk] int64"""

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def dynamic(self) -> bool:
        return self.span is not None and self.span.ndim == 3

    def reach_list(self) -> list[int]:
        """As `Rule.reach_list`."""
        return list_reach(self.reach, self.heads)

    def limits(self) -> list[int]:
        """As `Rule.limits`."""
        return shorten_by_spans(self.reach_list(), self.span, self.key_span, self.ramp)

    def ids(self) -> list[Tensor]:
        """Its tensors that have no gradient."""
        given = (self.q_positions, self.k_positions, self.q_documents, self.k_documents, *(self.orders or ()))
        pattern = () if self.blocks is None else self.blocks.tensors()
        return [t for t in (*given, *pattern) if t is not None]


@dataclass(eq=False)
class Dense(Lowered):
    """A call with every term, for the reference alone, which computes each term's equation directly. Other backends get
    these terms as separate calls."""

    stride: tuple[int, ...] = ()
    """[H]; empty: all 1 and no skip"""
    skip: tuple[int, ...] = ()
    sink_tokens: int = 0
    forget: Tensor | None = None
    """[1 or B, 1 or H, Tk]"""
    distance_value: Tensor | None = None
    """[1 or H, L, Dv]"""
    others: tuple[Dense, ...] = ()
    """the other rules of a Union"""


def flatten(call: Call) -> Lowered:
    """The last step, after the passes removed every term that backends do not take."""
    rule = call.rule
    done = rule.distance_value is None and rule.forget is None and not rule.sink_tokens and not call.others
    assert done and rule.stride == 1 and rule.skip == 0, "a pass left a term that Lowered cannot hold"
    return Lowered(*_shared(call))


def dense(call: Call) -> Dense:
    """The call unchanged, without any pass, for the reference."""
    rule = call.rule
    stride, skip = zip(*rule.strides(), strict=True) if rule.stride != 1 or rule.skip != 0 else ((), ())
    others = tuple(dense(other) for other in call.others)
    return Dense(
        *_shared(call), stride=stride, skip=skip, sink_tokens=rule.sink_tokens, forget=rule.forget,
        distance_value=rule.distance_value, others=others,
    )  # fmt: skip


def _shared(call: Call) -> tuple:
    """The fields of `Lowered`, in order. Documents come from the call."""
    rule = call.rule
    return (
        call.q, call.k, call.v, call.scale, call.dropout, call.seed, call.q_positions, call.k_positions,
        call.q_documents, call.k_documents, call.numbers, rule.causal, call.shift, rule.max_future, rule.ramp,
        rule.reach, rule.span, rule.distance_bias, rule.distance_vec, rule.distance_scale, rule.key_bias, rule.key_span,
        rule.sink_logits, rule.blocks, rule.orders,
    )  # fmt: skip
