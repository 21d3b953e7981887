"""A layer's memory in training: hidden states of earlier segments (segment.py stores them).

States are projected again in every segment, so that gradients reach the projections. Heads run in groups of similar
context length, and each group projects only the states it sees, so that short heads do not pay for long ones.
Shapes: B batch, T new tokens, M remembered ones, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spanformer.memory.base import LayerCall, unread
from spanformer.memory.groups import group_heads
from spanformer.memory.segment import Tape, remember
from spanformer.ops import AnyRule, Attended, Rule

RuleFor = Callable[[int], tuple[AnyRule, AnyRule]]
"""need → for the last `need` remembered tokens and the new ones: the mechanism's rule, and its sum with the positions'
rule"""


class HiddenStates:
    """states [B, M, dim], detached; length: how many to keep after the new tokens; layer: its index, from 0."""

    def __init__(self, states: Tensor, tape: Tape | None = None, *, length: int = 0, layer: int = 0) -> None:
        self.states, self.tape, self.length, self.layer = states, tape, length, layer

    def keep(self, states: Tensor) -> HiddenStates:
        last, tape = remember(self.states, states, self.length, self.tape, self.layer)
        return HiddenStates(last, tape, length=self.length, layer=self.layer)

    @property
    def tokens(self) -> int:
        return self.states.shape[1]

    def bytes(self) -> int:
        return self.states.numel() * self.states.element_size()

    def tensors(self) -> dict[str, Tensor]:
        return {"hidden": self.states}

    def with_tensors(self, tensors: dict[str, Tensor]) -> HiddenStates:
        return HiddenStates(tensors["hidden"], length=self.length, layer=self.layer)

    def attend(self, call: LayerCall) -> tuple[Attended, Tensor | None]:
        mechanism, past = call.mechanism, self.states.shape[1]
        refused = mechanism.supports(position=call.position)
        if refused:
            raise ValueError(refused[0])
        rule = None if mechanism.rule_needs() != "nothing" else mechanism.rule(call.view)
        context = mechanism.context_length() if rule is None else _context_lengths(mechanism, rule)
        groups = group_heads(_by_kv_head(context, call.shared), past, call.q.device)
        if sink_tokens := mechanism.sink_tokens:  # the first tokens must be in memory, at their positions
            if call.view.start - past > 0:
                raise ValueError(
                    f"sink_tokens is {sink_tokens}, and the segment memory has dropped the first tokens of the "
                    "text; decode it with a KV cache (LM.decode), or use learned sink logits"
                )
            groups = [(list(range(call.k.shape[1])), past)]
        rule_for = self._rules(call, rule, context)
        if call.view.nobody:
            own, _ = rule_for(groups[0][1])
            return unread(call), mechanism.penalty(own, call.view)
        if len(groups) == 1:
            own, ruled = rule_for(groups[0][1])
            found = self._group(call, ruled, call.position.encode, groups[0][1], None)
            return found, mechanism.penalty(own, call.view)
        return self._by_groups(call, rule_for, groups)

    def _rules(self, call: LayerCall, rule: AnyRule | None, context: list[int]) -> RuleFor:
        """The mechanism's rule plus the position encoding's. rule: None if it depends on the positions of the keys."""
        past, new, mechanism = self.states.shape[1], call.q.shape[2], call.mechanism
        far = max(context)
        at_once = rule if rule is not None or past else mechanism.rule(self._stretch(call, 0))
        if at_once is not None and not at_once.causal:
            far = max(far, _farthest(at_once))
        added = call.position.rule(call.view, min(far, past + new - 1) + 1)

        def rule_for(need: int) -> tuple[AnyRule, AnyRule]:
            if rule is not None:
                return rule, rule if added is None else rule + added
            own = mechanism.rule(self._stretch(call, need)) if at_once is None else at_once
            if added is None or not own.causal:
                return own, own if added is None else own + added
            # a pattern may have no reach, and tables end at a distance
            return own, own + Rule(call.q.shape[1], causal=False, reach=[n + 1 for n in context]) + added

        return rule_for

    def _by_groups(
        self, call: LayerCall, rule_for: RuleFor, groups: list[tuple[list[int], int]]
    ) -> tuple[Attended, Tensor | None]:
        parts, order, penalty = [], [], None
        for kv_heads, need in groups:
            heads = [h * call.shared + n for h in kv_heads for n in range(call.shared)]
            index, kv_index = (torch.tensor(i, device=call.q.device) for i in (heads, kv_heads))
            keys = functools.partial(call.k.index_select, 1, kv_index)
            some = replace(call, q=call.q.index_select(1, index), keys=keys, v=call.v.index_select(1, kv_index))
            own, rule = rule_for(need)
            if not parts:  # every group's rule is for all heads
                penalty = call.mechanism.penalty(own, call.view)
            encode = call.position.encode_for(heads)
            parts.append(self._group(some, rule.for_heads(heads, kv_heads), encode, need, kv_heads))
            order += heads
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=call.q.device)
        return Attended(*(torch.cat(each, 1).index_select(1, back) for each in zip(*parts, strict=True))), penalty

    def _group(self, call: LayerCall, rule: AnyRule, encode: Any, need: int, kv_heads: list[int] | None) -> Attended:
        """Attention of some heads over the last `need` remembered tokens and the new ones; kv_heads None: all."""
        k, v = call.k, call.v
        if need:
            old = call.project(self.states[:, self.states.shape[1] - need :], kv_heads)
            k, v = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
        view = replace(self._stretch(call, need), encode=encode)
        q, k = encode(call.q, k, view)
        return call.mechanism(q, k, v, rule, view)

    def _stretch(self, call: LayerCall, need: int) -> Any:
        """The view of the last `need` remembered tokens and the new ones."""
        new, view = call.view.x.shape[1], call.view
        states = self.states[:, self.states.shape[1] - need :]
        keys, documents = need + new, view.documents
        if isinstance(documents, Tensor):
            documents = (documents[:, documents.shape[1] - new :], documents[:, documents.shape[1] - keys :])
        return replace(
            view,
            documents=documents,
            padding=_last(view.padding, keys),
            global_attention_mask=_last(view.global_attention_mask, keys),
            start=view.start - need,
            length=keys,
            keys=torch.cat([states, view.x], 1) if call.mechanism.rule_needs() == "states" else None,
        )


def _context_lengths(mechanism: Any, rule: AnyRule) -> list[int]:
    """[H] how many earlier tokens each head sees in this segment."""
    context = mechanism.context_length()
    for heads, part in rule.parts():
        if any(leaf.dynamic and leaf.span is not None and leaf.span.device.type == "cpu" for leaf in part.leaves()):
            for head, limit in zip(heads, part.limits(), strict=True):
                context[head] = max(limit - 1, 0)  # on the CPU only: elsewhere reading spans makes the host wait
    return context


def _by_kv_head(context: list[int], shared: int) -> list[int]:
    """[Hkv] the longest context among the query heads of each key/value head."""
    return [max(context[h : h + shared]) for h in range(0, len(context), shared)]


def _farthest(rule: AnyRule) -> int:
    """How far heads with block patterns see to either side: context_length does not count the future."""
    return max((max(leaf.reach_list()) - 1 for leaf in rule.leaves() if leaf.blocks is not None), default=0)


def _last(ids: Tensor | None, length: int) -> Tensor | None:
    return None if ids is None else ids[:, max(0, ids.shape[1] - length) :]
