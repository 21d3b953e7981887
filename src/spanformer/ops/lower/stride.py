"""Strides and skips, removed before a call reaches a backend: tokens are folded into residue classes, so a dilated head
costs only the pairs it sees. A stride of s leaves s sequences of every s-th token, none of which sees another:

    d ≡ 0 mod s   ⇔   i ≡ j mod s        token i = n·s + c  →  row c of the batch, token n        distance d → d / s

Shapes: B batch, H query heads, Hkv key/value heads, T tokens of either kind, s the stride, n tokens of a class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from spanformer.ops.attended import Attended
from spanformer.ops.lower.call import Call, Numbers, longest_distance
from spanformer.ops.rule import Rule
from spanformer.ops.tables import ENDING

Run = Callable[[Call], Attended]


def attend_folded(call: Call, run: Run) -> Attended:
    """One call for each (stride, skip) among the heads; `run` receives calls without either."""
    groups: dict[tuple[int, int], list[int]] = {}
    for head, stride_skip in enumerate(call.rule.strides()):
        groups.setdefault(stride_skip, []).append(head)
    if len(groups) == 1:
        return _alike(call, *next(iter(groups)), run)
    found = [_alike(_some_heads(call, heads), *both, run) for both, heads in groups.items()]
    order = [head for heads in groups.values() for head in heads]
    back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=call.q.device)
    return Attended(*(torch.cat(parts, 1).index_select(1, back) for parts in zip(*found, strict=True)))


def _some_heads(call: Call, heads: list[int]) -> Call:
    group = call.q.shape[1] // call.k.shape[1]
    kv_heads = [h // group for h in heads]
    if kv_heads == [
        h for h in dict.fromkeys(kv_heads) for _ in range(group)
    ]:  # complete groups keep sharing key/value heads
        kv_heads = list(dict.fromkeys(kv_heads))
    index, kv_index = (torch.tensor(some, device=call.q.device) for some in (heads, kv_heads))
    k, v = (t.index_select(1, kv_index) for t in (call.k, call.v))
    numbers = None
    if call.dropout:
        numbers = call.numbered()
        numbers = numbers._replace(heads=numbers.heads.index_select(1, index))
    rule = call.rule.for_heads(heads, kv_heads)
    return replace(call, q=call.q.index_select(1, index), k=k, v=v, rule=rule, numbers=numbers)


def _renumbered(call: Call, queries: Callable, keys: Callable, classes: int) -> Numbers | None:
    """Dropout's indices for a folded call; `queries` and `keys` fold a tensor along an axis into a batch `classes`
    times as long."""
    if not call.dropout:
        return None
    numbers = call.numbered()
    heads = numbers.heads.repeat_interleave(classes, 0)
    return Numbers(heads, queries(numbers.queries, 1), keys(numbers.keys, 1))


def _alike(call: Call, stride: int, skip: int, run: Run) -> Attended:
    call = replace(call, rule=replace(call.rule, stride=1, skip=0))
    if stride == 1 or not call.q.shape[2]:
        return run(_skipping(call, skip))
    offset = regular_offset(call)
    if offset is None or call.rule.blocks is not None:  # cannot be folded: treat each class as a document
        return run(_skipping(_by_documents(call, stride), skip))
    fold = (_few if call.q.shape[2] < stride else _many)(call, stride, offset)
    found = run(_skipping(fold.call, -(-skip // stride)))
    return Attended(fold.undo(found.out), fold.undo(found.lse[..., None])[..., 0])


def regular_offset(call: Call) -> int | None:
    """The distance from key 0 to query 0 if both are runs of consecutive positions; None if they are not, or if it
    cannot be known without waiting for an accelerator or while compiling."""
    if call.q_positions is None or call.k_positions is None:
        return call.offset
    if call.q.device.type != "cpu" or torch.compiler.is_compiling() or not call.q.shape[2] or not call.k.shape[2]:
        return None
    q, k = call.q_positions, call.k_positions
    if any(bool((t - t[:, :1] != torch.arange(t.shape[1])).any()) for t in (q, k)):
        return None
    gap = q[:, 0] - k[:, 0]
    return int(gap[0]) if bool((gap == gap[0]).all()) else None


def _by_documents(call: Call, stride: int) -> Call:
    """The same pairs by document ids, at the cost of the undilated band."""
    q, k = (positions % stride for positions in call.positions())
    if call.q_documents is not None and call.k_documents is not None:
        of_q, of_k = _small(call.q_documents, call.k_documents)
        q, k = q + of_q * stride, k + of_k * stride
    return replace(call, q_documents=q, k_documents=k)


def _small(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Ids renumbered from 0, small enough to be multiplied: they may have been hashes."""
    if torch.compiler.is_compiling():  # their number is not known then
        return q, k
    ids = torch.cat([q.flatten(), k.flatten()]).unique(return_inverse=True)[1]
    return ids[: q.numel()].view(q.shape), ids[q.numel() :].view(k.shape)


def _skipping(call: Call, skip: int) -> Call:
    """The skipped distances as a bias of −inf."""
    if not skip:
        return call
    rule = call.rule
    tables = [t.shape[1] for name in ENDING if (t := getattr(rule, name)) is not None]
    if tables:
        length = min(tables)
    elif call.q.device.type == "cpu":
        length = min(max(rule.limits()), longest_distance(call))
    else:
        length = min(max(rule.reach_list()), longest_distance(call))
    hidden = torch.zeros(rule.heads, max(1, length), device=call.q.device)
    hidden[:, :skip] = -math.inf
    return replace(call, rule=rule + Rule(rule.heads, causal=rule.causal, distance_bias=hidden))


class _many:
    """For calls where every class has queries and keys. Padding before the queries aligns queries with keys the same
    way in every class; its results are never read. Keys are padded at the end."""

    def __init__(self, call: Call, stride: int, offset: int) -> None:
        (_, _, tq, _), tk = call.q.shape, call.k.shape[2]
        self.batch, self.stride, self.front, self.queries = call.q.shape[0], stride, offset % stride, tq
        n_q, n_k = -(-(self.front + tq) // stride), -(-tk // stride)
        behind = n_k * stride - tk
        rule = call.rule
        if behind and (not rule.causal or offset + tq > tk):  # otherwise the padding is in every query's future
            rule = rule + Rule(rule.heads, causal=rule.causal, key_bias=call.q.new_zeros(1, 1, tk, dtype=torch.float32))
        q = lambda t, axis: self._fold(t, axis, self.front, n_q)  # noqa: E731
        k = lambda t, axis, value=0.0: self._fold(t, axis, 0, n_k, value)  # noqa: E731
        first = (offset - self.front) // stride
        placed = first != n_k - n_q
        at = call.q.device
        self.call = replace(
            call,
            q=q(call.q, 2), k=k(call.k, 2), v=k(call.v, 2), rule=_shorter(rule, stride, q, k),
            q_positions=(first + torch.arange(n_q, device=at))[None] if placed else None,
            k_positions=torch.arange(n_k, device=at)[None] if placed else None,
            q_documents=None if call.q_documents is None else q(call.q_documents, 1),
            k_documents=None if call.k_documents is None else k(call.k_documents, 1),
            numbers=_renumbered(call, q, k, stride),
        )  # fmt: skip

    def _fold(self, t: Tensor, axis: int, front: int, n: int, value: float = 0.0) -> Tensor:
        """[B or 1, …, T, …] → [B·s, …, n, …]; a view if B is 1 and there is no padding."""
        behind = n * self.stride - front - t.shape[axis]
        if front or behind:
            t = pad(t, (0, 0) * (t.ndim - 1 - axis) + (front, behind), value=value)
        t = t.unflatten(axis, (n, self.stride)).movedim(axis + 1, 1).expand(self.batch, *[-1] * t.ndim)
        return t.flatten(0, 1) if self.batch > 1 else t[0]

    def undo(self, t: Tensor) -> Tensor:
        """[B·s, H, n, X] → [B, H, Tq, X]"""
        t = t.unflatten(0, (self.batch, self.stride)).movedim(1, 3).flatten(2, 3)
        return t.narrow(2, self.front, self.queries)


class _few:
    """Fewer queries than classes, as in decoding: each query attends to the keys of its class."""

    def __init__(self, call: Call, stride: int, offset: int) -> None:
        (_, _, tq, _), tk, at = call.q.shape, call.k.shape[2], call.q.device
        self.batch = call.q.shape[0]
        query = offset + torch.arange(tq, device=at)
        n = -(-tk // stride)
        place = query[:, None] % stride + stride * torch.arange(n, device=at)  # [Tq, n] of the keys
        index, beyond = place.clamp(max=max(0, tk - 1)), place >= tk

        def keys(t: Tensor, axis: int, _value: float = 0.0) -> Tensor:
            """[B or 1, …, Tk, …] → [B·Tq, …, n, …]"""
            t = t.index_select(axis, index.flatten()).unflatten(axis, (tq, n)).movedim(axis, 1)
            return t.expand(self.batch, *[-1] * (t.ndim - 1)).flatten(0, 1)

        def queries(t: Tensor, axis: int) -> Tensor:
            t = t.unsqueeze(axis + 1).movedim(axis, 1)
            return t.expand(self.batch, *[-1] * (t.ndim - 1)).flatten(0, 1)

        rule = _shorter(call.rule, stride, queries, keys)
        hidden = torch.zeros(tq, 1, n, device=at).masked_fill(beyond[:, None], -math.inf).repeat(self.batch, 1, 1)
        self.call = replace(
            call,
            q=queries(call.q, 2), k=keys(call.k, 2), v=keys(call.v, 2),
            rule=rule + Rule(rule.heads, causal=rule.causal, key_bias=hidden),
            q_positions=(query // stride)[:, None].repeat(self.batch, 1),
            k_positions=torch.arange(n, device=at)[None],
            q_documents=None if call.q_documents is None else queries(call.q_documents, 1),
            k_documents=None if call.k_documents is None else keys(call.k_documents, 1),
            numbers=_renumbered(call, queries, keys, tq),
        )  # fmt: skip

    def undo(self, t: Tensor) -> Tensor:
        """[B·Tq, H, 1, X] → [B, H, Tq, X]"""
        return t.unflatten(0, (self.batch, -1)).movedim(1, 3).flatten(2, 3)


def _shorter(rule: Rule, stride: int, queries: Callable, keys: Callable) -> Rule:
    """The rule for distances d / stride."""
    span = rule.span
    if span is not None:
        span = _shorter_span(queries(span, 2) if rule.dynamic else span, rule.ramp, stride)
    return replace(
        rule,
        reach=None if rule.reach is None else [-(-r // stride) for r in rule.reach_list()],
        span=span,
        ramp=rule.ramp / stride,
        key_bias=None if rule.key_bias is None else keys(rule.key_bias, 2, -math.inf),
        key_span=None if rule.key_span is None else _shorter_span(keys(rule.key_span, 2), rule.ramp, stride),
        documents=None,  # the call has them
        max_future=rule.max_future // stride,
        **{name: t[:, rule.max_future % stride :: stride] for name in ENDING if (t := getattr(rule, name)) is not None},
    )


def _shorter_span(z: Tensor, ramp: float, stride: int) -> Tensor:
    """z / stride, in at least 32 bits. Where a ramp ends at an existing distance n, m = 0 exactly, and the span
    has no gradient. Thirds would round to a small m above 0, so such spans are shortened by the rounding error."""
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    short = z / stride
    if not stride & (stride - 1) or ramp % stride == 0:  # exact
        return short
    end = z.detach().double() + ramp
    least = end / stride * (1 - 2 * torch.finfo(z.dtype).eps) - ramp / stride
    excess = torch.where(end % stride == 0, short.detach() - least.clamp(min=0), 0)
    return short - excess.to(z.dtype)
