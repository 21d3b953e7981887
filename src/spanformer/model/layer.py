"""Self-attention with slots for the mechanism and the position encoding, over new and remembered tokens.

Remembered states are projected anew in every segment, so that gradients reach the projections. That is done only for
the heads that look back so far: heads are served in groups of similar lookback, and one long head does not make its
neighbours pay. Shapes: B batch, T new tokens, M remembered ones, H heads, Hkv key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from spanformer.attention import Attention, View
from spanformer.memory import Persistent
from spanformer.memory.groups import group_heads
from spanformer.model.linear import Linear, product
from spanformer.ops import Attended, Rule, merge
from spanformer.position import Position

Turn = Callable[[Tensor, Tensor, View], tuple[Tensor, Tensor]]
"""queries and keys, each made to know where it stands (`Position.turn`)"""


class SelfAttention(nn.Module):
    def __init__(self, dim: int, kv_heads: int, mechanism: Attention, persistent: Persistent | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = mechanism.heads, kv_heads, dim // mechanism.heads
        self.mechanism, self.persistent = mechanism, persistent
        self.query = Linear(dim, dim, bias=False)
        self.key = Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = Linear(dim, kv_heads * self.head_dim, bias=False)
        self.out = Linear(dim, dim, bias=False)
        mechanism.start_from(self.query, self.key, self.value)

    def forward(self, x: Tensor, past: Tensor, view: View, position: Position) -> tuple[Tensor, Tensor | None]:
        """x [B, T, dim]; past [B, M, dim], remembered; view with documents and padding of past and x; the position
        encoding, which layers may share.

        Returns [B, T, dim], and what the rule asks to be added to the loss.
        """
        view = replace(view, x=x)
        if self.mechanism.placed:  # what is seen depends on the keys: each group's rule is made for its own
            lookback = self.mechanism.lookback()
            rule = None
        else:
            rule = self.mechanism.rule(view)
            lookback = self._lookback(rule)
        if not self.mechanism.turnable and type(position).turn is not Position.turn:
            raise ValueError(
                f"{type(self.mechanism).__name__} would feel where turned queries and keys stand, and not only how far "
                f"apart, as {type(position).__name__} has it; use other positions (docs/compatibility.md), or none"
            )
        q = self.mechanism.map_queries(split_heads(self.query(x), self.heads))
        fresh = split_heads(self.key(x), self.kv_heads), split_heads(self.value(x), self.kv_heads)
        groups = group_heads(self._shared(lookback), past.shape[1], x.device)
        if self.mechanism.kept:  # the first tokens must be there, at their own places
            if view.start > 0:
                raise ValueError(
                    f"heads here keep the text's first {self.mechanism.kept} tokens in sight, and the memory has "
                    "forgotten them; read the text with a cache (LM.read), or use learned sinks"
                )
            groups = [(list(range(self.kv_heads)), past.shape[1])]
        far = max(lookback)
        at_once = rule if rule is not None or past.shape[1] else self.mechanism.rule(self._stretch(view, past, 0))
        if at_once is not None and not at_once.causal:
            far = max(far, _farthest(at_once))
        length = min(far, past.shape[1] + x.shape[1] - 1) + 1
        added = position.rule(view, length)

        def rule_for(need: int) -> Rule:
            if rule is not None:
                return rule if added is None else rule + added
            own = self.mechanism.rule(self._stretch(view, past, need)) if at_once is None else at_once
            if added is None or not own.causal:
                return own if added is None else own + added
            # a pattern need not say how far it reaches, and tables go no further than that
            return own + Rule(self.heads, causal=False, reach=[n + 1 for n in lookback]) + added

        if len(groups) == 1:
            ruled = rule_for(groups[0][1])
            penalty = ruled.penalty
            found = self._attend(q, fresh, past, ruled, view, position.turn, groups[0][1], None)
        else:
            found, penalty = self._by_groups(q, fresh, past, rule_for, view, position, groups)
        if self.persistent is not None:
            dropout = self.mechanism.dropout if self.training else 0.0
            apart = self.persistent.attend(q, backend=self.mechanism.backend, dropout=dropout)
            found = merge([found, apart])
        return self.out(found.out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1)), penalty

    def _lookback(self, rule: Rule) -> list[int]:
        """[H] how many earlier tokens each head looks back at in this segment."""
        lookback = self.mechanism.lookback()
        for heads, part in rule.parts():
            if part.dynamic and part.span is not None and part.span.device.type == "cpu":
                for head, limit in zip(heads, part.limits(), strict=True):
                    lookback[head] = max(limit - 1, 0)  # elsewhere, reading them would make the host wait
        return lookback

    def _shared(self, lookback: list[int]) -> list[int]:
        """[Hkv] the longest lookback among the query heads of each key/value head."""
        shared = self.heads // self.kv_heads
        return [max(lookback[h : h + shared]) for h in range(0, self.heads, shared)]

    def _stretch(self, view: View, past: Tensor, need: int) -> View:
        """The view of the last `need` remembered tokens and the new ones; `view.start` is where all of them begin."""
        assert view.x is not None
        memory = past[:, past.shape[1] - need :]
        return replace(
            _last(view, need + view.x.shape[1], view.x.shape[1]),
            start=view.start + past.shape[1] - need,
            length=need + view.x.shape[1],
            keys=torch.cat([memory, view.x], 1) if self.mechanism.reads_keys else None,
        )

    def _by_groups(
        self, q, fresh, past, rule_for: Callable[[int], Rule], view: View, position: Position, groups
    ) -> tuple[Attended, Tensor | None]:
        shared = self.heads // self.kv_heads
        parts, order, penalty = [], [], None
        for kv_heads, need in groups:
            heads = [h * shared + n for h in kv_heads for n in range(shared)]
            index, kv_index = (torch.tensor(i, device=q.device) for i in (heads, kv_heads))
            some = tuple(t.index_select(1, kv_index) for t in fresh)
            rule = rule_for(need)
            penalty = rule.penalty if penalty is None else penalty  # the layer's, said by every rule
            part = rule.for_heads(heads, kv_heads)
            turn = position.turn_of(heads)
            parts.append(self._attend(q.index_select(1, index), some, past, part, view, turn, need, kv_heads))
            order += heads
        back = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=q.device)
        found = Attended(
            torch.cat([p.out for p in parts], 1).index_select(1, back),
            torch.cat([p.lse for p in parts], 1).index_select(1, back),
        )
        return found, penalty

    def _attend(
        self, q: Tensor, fresh, past: Tensor, rule: Rule, view: View, turn: Turn, need: int, kv_heads
    ) -> Attended:
        """Attention of some heads over the last `need` remembered tokens and the new ones; kv_heads None: all."""
        k, v = fresh
        if need:
            memory = past[:, past.shape[1] - need :]
            k = torch.cat([self._project(memory, self.key, kv_heads), k], 2)
            v = torch.cat([self._project(memory, self.value, kv_heads), v], 2)
        view = replace(self._stretch(view, past, need), turn=turn)
        q, k = turn(q, k, view)
        return self.mechanism.mix(q, k, v, rule, view)

    def _project(self, memory: Tensor, linear: nn.Linear, kv_heads: list[int] | None) -> Tensor:
        """[B, heads, need, D]"""
        if kv_heads is None:
            return split_heads(linear(memory), self.kv_heads)
        weight = linear.weight.view(self.kv_heads, self.head_dim, -1)[kv_heads].flatten(0, 1)
        return split_heads(product(memory, weight), len(kv_heads))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads · D] → [B, heads, T, D], without a copy."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)  # −1 is unknown without rows


def _farthest(rule: Rule) -> int:
    """How far to either side heads may look that go by blocks: what these hold ahead no lookback says."""
    return max((max(part.reach_list()) - 1 for _, part in rule.parts() if part.blocks is not None), default=0)


def _last(view: View, keys: int, queries: int) -> View:
    """The view of the last `keys` keys."""
    documents, padding, chosen = view.documents, view.padding, view.chosen
    if isinstance(documents, torch.Tensor):
        documents = (documents[:, documents.shape[1] - queries :], documents[:, documents.shape[1] - keys :])
    return replace(
        view,
        documents=documents,
        padding=None if padding is None else padding[:, padding.shape[1] - keys :],
        chosen=None if chosen is None else chosen[:, chosen.shape[1] - keys :],
    )
