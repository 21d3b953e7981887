"""What an attention head may see, as plain data: tensors that kernels, KV caches and cost models can all read.

Shapes: B batch, H query heads, Hkv key/value heads (H a multiple of Hkv), Tq queries, Tk keys,
D and Dv head sizes of keys and values, L the length of a table over distances 0 … L − 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from spanformer.ops.blocks import BlockIndex
from spanformer.ops.rule_checks import KEY_TERMS, as_reach, check_numbers, check_orders, check_shapes, per_head
from spanformer.ops.tables import (
    TABLES,
    add_tables,
    add_values,
    check_max_future,
    counted,
    multiply_tables,
    shared_max_future,
)

UNLIMITED = 1 << 40  # a reach beyond any sequence
HEAD_AXIS = {name: 0 for name in (*TABLES, "sink_logits")} | {name: 1 for name in KEY_TERMS}
"""the axis of each term that counts heads; a size of 1 there serves all heads. (A span is [H] or [B, H, Tq].)"""


@dataclass(frozen=True, eq=False)
class Rule:
    """Which keys each head sees, and with what bias. Every term but `heads` is optional; `a + b` composes.

    A query at position i and a key at position j are at distance d = i − j. An empty causal rule is ordinary
    causal attention: keys with d ≥ 0. A non-causal rule also sees the future and reads every term at |d|.
    """

    heads: int
    """H, the number of query heads."""
    _: KW_ONLY
    causal: bool = True
    """Never see the future (d < 0)."""
    reach: Tensor | Sequence[int] | int | None = None
    """[H] (or one number for all): a head of reach r sees d = 0 … r − 1. The rule stores a copy, int64 on the CPU."""
    span: Tensor | None = None
    """[H] static or [B, H, Tq] dynamic: z in m = clip((ramp + z − d) / ramp, 0, 1), which multiplies the
    weights before they are renormalised; at least −ramp. Its gradient is nonzero only inside the ramp, 0 < m < 1."""
    ramp: float = 32.0
    """R, the width of a span's soft edge in tokens."""
    distance_bias: Tensor | None = None
    """[H, L] added to the score at distance d (ALiBi, T5)."""
    distance_vec: Tensor | None = None
    """[1 or H, L, D]: q·r[d] is added to q·k before scaling (Shaw, Transformer-XL, the table of the paper's code)."""
    distance_value: Tensor | None = None
    """[1 or H, L, Dv]: Σ_j a_ij·r[d] is added to the output, with the weights a_ij (Shaw's relative values). Unlike the
    other tables it may be short: farther distances read its last entry (in the future, its first). With `max_future`, L
    is odd and distance 0 is its middle entry."""
    distance_scale: Tensor | None = None
    """[H, L]: the score becomes relu(score)·f[d] before biases are added (DA-Transformer)."""
    max_future: int = 0
    """n: tables hold distances −n … L − 1 − n, so that future keys have separate entries. 0: tables are read at |d|.
    Only without `causal`; a sum with a causal rule drops the future entries."""
    key_bias: Tensor | None = None
    """[1 or B, 1 or Hkv or H, Tk] added to every score of a key; −inf hides the key (padding)."""
    key_span: Tensor | None = None
    """[1 or B, 1 or H, Tk]: e in m = clip((ramp + e − d) / ramp, 0, 1), like `span`, but one for each key
    (Expire-Span). Beside a span, both multiply the weight."""
    forget: Tensor | None = None
    """[1 or B, 1 or H, Tk]: c, the cumulative sum of the keys' log forget gates, so that it never grows; the
    score of a pair gets c_i − c_j (Forgetting Transformer). Queries are the last Tq of the keys."""
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    """[Tk] or [B, Tk] integer ids: a token sees only tokens of its own document. Queries are the last Tq of them;
    a pair (queries' ids [.., Tq], keys' ids [.., Tk]) gives both."""
    orders: tuple[Tensor, Tensor] | None = None
    """([E, 1 or B, Tq], [E, 1 or B, Tk]) int64: places of queries and keys in E other orders of the tokens. A pair that
    reach and span show in one of them (its distance there counts as d) is hidden: another call has seen it. Only in a
    causal rule beside reach, span, documents and key_bias (rounds of LSH attention)."""
    sink_logits: Tensor | None = None
    """[H] a learned logit in every softmax, without a value: it takes up unneeded attention weight."""
    sink_tokens: int = 0
    """Keys at positions 0 … sink_tokens − 1 are visible with full weight, whatever reach, span, stride and skip say:
    attention sinks that are tokens."""
    stride: Sequence[int] | int = 1
    """[H] or one for all: a head sees only distances that are multiples of it (dilation), and costs only those."""
    skip: Sequence[int] | int = 0
    """[H] or one for all: a head sees no distance below it."""
    blocks: BlockIndex | None = None
    """A block-sparse pattern over positions."""
    paper_compat: bool = False
    """The conventions of Sukhbaatar et al.'s code: a token does not see itself, and distances (in reach,
    span and tables alike) count from the previous token, d − 1. The reach is then the code's hard cap, its maximum
    span."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.reach is not None:
            object.__setattr__(self, "reach", as_reach(self.reach, self.heads))
        unfit = [name for name in (*TABLES, "blocks") if getattr(self, name) is not None]
        if self.sink_tokens and unfit:
            raise ValueError(
                f"sink_tokens is {self.sink_tokens} beside {' and '.join(unfit)}, which limits distances or "
                "positions; a sink token may be at any distance, so drop one of them"
            )
        if self.paper_compat and not self.causal:
            raise ValueError("paper_compat is True with causal=False; its heads only look back, so pass causal=True")
        for name, least in (("stride", 1), ("skip", 0)):
            object.__setattr__(self, name, per_head(name, getattr(self, name), self.heads, least))
            if self.paper_compat and getattr(self, name) != least:
                raise ValueError(
                    f"paper_compat=True counts distances from the previous token, which {name} contradicts; drop one "
                    "of them"
                )
        check_shapes(self)
        check_orders(self)
        check_max_future(self)
        for name, span, least in (("span", self.span, -self.ramp), ("key_span", self.key_span, 0.0)):
            if span is not None and span.device.type == "cpu" and not torch.compiler.is_compiling():
                lowest = float(span.detach().min()) if span.numel() else 0.0
                if not lowest >= least:  # NaN fails too
                    raise ValueError(
                        f"{name} of shape {list(span.shape)} holds {lowest}; expected numbers of tokens, at least "
                        f"{least:g}"
                    )

    @property
    def dynamic(self) -> bool:
        """True if each query has its own span."""
        return self.span is not None and self.span.ndim == 3

    def limits(self) -> list[int]:
        """Per head, how many distances can have weight, without sink tokens: min(reach, ⌈span + ramp⌉). Reads spans,
        the keys too (a sync on a GPU)."""
        return shorten_by_spans(self.reach_list(), self.span, self.key_span, self.ramp)

    def strides(self) -> list[tuple[int, int]]:
        """Per head (stride, skip)."""
        pairs = ([n] * self.heads if isinstance(n, int) else n for n in (self.stride, self.skip))
        return list(zip(*pairs, strict=True))

    def reach_list(self) -> list[int]:
        """The reach as plain integers; unlimited heads have a number beyond any sequence."""
        assert self.reach is None or isinstance(self.reach, Tensor)  # __post_init__ converted it
        return list_reach(self.reach, self.heads)

    def leaves(self) -> tuple[Rule, ...]:
        """The plain rules in it: only itself; a Union or HeadGroups has several."""
        return (self,)

    def parts(self) -> list[tuple[list[int], Rule]]:
        """[(heads, their rule)]: one group of all heads; HeadGroups has several."""
        return [(list(range(self.heads)), self)]

    def for_heads(self, heads: Sequence[int], kv_heads: Sequence[int] | None = None) -> Rule:
        """The rule of some heads, in the order given, with the key/value heads they use. kv_heads None:
        each head has its own key/value head."""

        def pick(name: str, axis: int) -> Tensor | None:
            t = getattr(self, name)
            if t is None or t.shape[axis] == 1:
                return t
            rows = t.shape[axis]
            chosen = heads if rows == self.heads else kv_heads
            if chosen is None:
                chosen = [h * rows // self.heads for h in heads]
            return t.index_select(axis, torch.tensor(chosen, device=t.device))

        return replace(
            self,
            heads=len(heads),
            reach=None if self.reach is None else [self.reach_list()[h] for h in heads],
            span=pick("span", 1 if self.dynamic else 0),
            stride=[self.strides()[h][0] for h in heads],
            skip=[self.strides()[h][1] for h in heads],
            blocks=None if self.blocks is None else self.blocks.for_heads(heads),
            **{name: pick(name, axis) for name, axis in HEAD_AXIS.items()},
        )

    def __add__(self, other: Rule) -> Rule:
        if not isinstance(other, Rule):
            return NotImplemented
        if self.heads != other.heads:
            raise ValueError(
                f"rules of {self.heads} and {other.heads} heads cannot be added; expected one number of heads"
            )
        causal = self.causal or other.causal
        future = 0 if causal else shared_max_future(self, other)

        def both(name: str, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor | None:
            return _either(counted(self, name, causal, future), counted(other, name, causal, future), join)

        mine, theirs = self.strides(), other.strides()
        return Rule(
            self.heads,
            causal=causal,
            reach=_either(self.reach, other.reach, lambda a, b: torch.minimum(a, b)),
            span=_either(self.span, other.span, _no_two("span")),
            ramp=_one_ramp(self, other),
            distance_bias=both("distance_bias", add_tables),
            distance_vec=both("distance_vec", add_tables),
            distance_value=both("distance_value", lambda a, b: add_values(a, b, future > 0)),
            distance_scale=both("distance_scale", multiply_tables),
            max_future=future,
            key_bias=_either(self.key_bias, other.key_bias, _add_key_biases),
            key_span=_either(self.key_span, other.key_span, _no_two("key_span")),
            forget=_either(self.forget, other.forget, lambda a, b: a + b),
            documents=_either(self.documents, other.documents, _same_documents),
            orders=_either(self.orders, other.orders, _no_two("orders")),  # pyright: ignore[reportArgumentType]
            sink_logits=_either(
                self.sink_logits, other.sink_logits, torch.logaddexp
            ),  # the denominator has exp of both: one logit, their logsumexp
            sink_tokens=max(self.sink_tokens, other.sink_tokens),
            stride=[math.lcm(a, b) for (a, _), (b, _) in zip(mine, theirs, strict=True)],
            skip=[max(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)],
            blocks=_either(self.blocks, other.blocks, lambda a, b: a & b),
            paper_compat=self.paper_compat or other.paper_compat,
        )


def list_reach(reach: Tensor | None, heads: int) -> list[int]:
    """[H] as plain integers."""
    return [UNLIMITED] * heads if reach is None else reach.tolist()


def shorten_by_spans(limits: list[int], span: Tensor | None, key_span: Tensor | None, ramp: float) -> list[int]:
    """Per head, how many of `limits` distances have weight under spans [H] or [B, H, Tq] and key spans [.., .., Tk]."""
    for z in (span, key_span):
        if z is not None and not z.numel():  # no queries, or no keys
            limits = [0] * len(limits)
        elif z is not None:
            longest = z.detach().amax((0, 2)) if z.ndim == 3 else z.detach()
            seen = [_seen(each, ramp) for each in longest.double().expand(len(limits)).tolist()]
            limits = [min(a, b) for a, b in zip(limits, seen, strict=True)]
    return limits


def _seen(span: float, ramp: float) -> int:
    """The number of distances 0, 1, … with m > 0, that is, d < span + ramp."""
    if span + ramp >= UNLIMITED:
        return UNLIMITED
    whole = math.floor(span)  # added to the whole span, a short ramp would be rounded away
    return whole + math.ceil(span - whole + ramp)


def _either(a, b, both):
    """The term that one of the rules has, or both combined."""
    if a is None or b is None:
        return a if b is None else b
    return both(a, b)


def _no_two(name: str):
    def refuse(_a: Tensor, _b: Tensor) -> Tensor:
        raise ValueError(f"both rules have a {name}; a head takes only one, so drop it from one of them")

    return refuse


def soft(rule: Rule) -> bool:
    """Whether the rule has a term that uses its ramp."""
    return rule.span is not None or rule.key_span is not None


def _one_ramp(a: Rule, b: Rule) -> float:
    if soft(a) and soft(b) and a.ramp != b.ramp:
        raise ValueError(f"rules with ramps {a.ramp:g} and {b.ramp:g} cannot be added; span and key_span share one")
    return a.ramp if soft(a) or not soft(b) else b.ramp


def _add_key_biases(a: Tensor, b: Tensor) -> Tensor:
    """One may have a row for each key/value head and the other for each query head: expand the first to query heads."""
    heads = max(a.shape[1], b.shape[1])
    rows_fit = a.shape[0] == b.shape[0] or 1 in (a.shape[0], b.shape[0])
    if not rows_fit or heads % a.shape[1] or heads % b.shape[1] or a.shape[2] != b.shape[2]:
        raise ValueError(
            f"key_bias of shapes {list(a.shape)} and {list(b.shape)} cannot be added; "
            "expected one number of keys, and batches and heads that broadcast"
        )
    return a.repeat_interleave(heads // a.shape[1], 1) + b.repeat_interleave(heads // b.shape[1], 1)


def _same_documents(a, b):
    pairs = zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=False)
    if isinstance(a, tuple) != isinstance(b, tuple) or not all(x is y or torch.equal(x, y) for x, y in pairs):
        raise ValueError("both rules have document ids, and they differ; give both the same ids")
    return a
