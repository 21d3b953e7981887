"""The first tokens of a text, which every later token still sees: the attention sinks of StreamingLLM
(Xiao et al., 2023), https://arxiv.org/abs/2309.17453

A call whose rule has `sink_tokens` becomes two: one over the other keys, with the rule, and one over the sink tokens,
without reach and span. Their results are merged by lse.

Shapes: B batch, Hkv key/value heads, Tk keys, N sink tokens, D head size.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spanformer.ops.lower.call import Call
from spanformer.ops.lower.piece import piece
from spanformer.ops.rule import Rule


def split_sink_tokens(call: Call) -> tuple[Call, Call]:
    """(call over the other keys, call over the sink tokens)."""
    rule = replace(call.rule, sink_tokens=0)
    free = replace(
        rule, reach=None, span=None, key_span=None, sink_logits=None, stride=1, skip=0
    )  # fmt: skip
    if call.k_positions is None:
        return _first_keys(call, rule, free)
    sinks = (call.k_positions >= 0) & (call.k_positions < call.rule.sink_tokens)  # [1 or B, Tk]
    most = call.rule.sink_tokens  # per row; each packed document may begin at 0, and then they must be counted
    if call.k_documents is not None:
        most = int(sinks.sum(1).max())
    index = sinks.int().topk(min(most, sinks.shape[1]), 1).indices  # [1 or B, N]
    others = replace(call, rule=hide(rule, sinks))
    there, numbers = sinks.gather(1, index), None
    if call.dropout:
        numbers = call.numbered()
        numbers = numbers._replace(keys=_rows(numbers.keys, index))
    few = replace(
        call,
        k=_take(call.k, index),
        v=_take(call.v, index),
        rule=hide(_take_bias(free, index), ~there),
        k_positions=call.k_positions.expand(len(index), -1).gather(1, index),
        k_documents=None if call.k_documents is None else _rows(call.k_documents, index),
        numbers=numbers,
    )
    return others, few


def _first_keys(call: Call, rule: Rule, free: Rule) -> tuple[Call, Call]:
    """Positions are 0 … Tk − 1: the sink tokens are the first ones."""
    n = min(call.rule.sink_tokens, call.k.shape[2])
    every = slice(None)
    few = piece(replace(call, rule=free), every, slice(0, n))
    return piece(replace(call, rule=rule), every, slice(n, None)), few


def hide(rule: Rule, hidden: Tensor) -> Rule:
    """The rule with a bias of −inf for the keys where hidden [1 or B, Tk] is True."""
    bias = torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, -math.inf)[:, None]
    return rule + Rule(rule.heads, causal=False, key_bias=bias)


def _take(t: Tensor, index: Tensor) -> Tensor:
    """[B, Hkv, Tk, D] at index [1 or B, N] → [B, Hkv, N, D]"""
    return t.gather(2, index[:, None, :, None].expand(t.shape[0], t.shape[1], -1, t.shape[3]))


def _take_bias(rule: Rule, index: Tensor) -> Rule:
    bias = rule.key_bias
    if bias is None:
        return rule
    rows = max(len(bias), len(index))
    at = index[:, None].expand(rows, bias.shape[1], -1)
    return replace(rule, key_bias=bias.expand(rows, -1, -1).gather(2, at))


def _rows(ids: Tensor, index: Tensor) -> Tensor:
    rows = max(len(ids), len(index))
    return ids.expand(rows, -1).gather(1, index.expand(rows, -1))
