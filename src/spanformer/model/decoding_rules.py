"""The rules of decoding, one for each part of a layer whose keys and values are in rings.

Shapes: B batch, T new tokens, H heads, Hkv key/value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from spanformer.attention import Attention, MixedMemory, View, read_spans, remembers_itself
from spanformer.memory import Cache
from spanformer.memory.many_tokens import RuleFor
from spanformer.memory.notes import noteworthy
from spanformer.model.block import Block
from spanformer.ops import AnyRule, Rule
from spanformer.position import Position

if TYPE_CHECKING:
    from spanformer.model.decoder import Decoder


def reaches(lm: Decoder) -> list[list[int]]:
    """For the rings of each layer, or of each part of it [Hkv]: the number of positions in a key/value head's ring: the
    context length of the longest head of its group, and the token itself."""
    shared = lm.config.heads // lm.config.groups
    read_spans(lm.spans_modules())
    found = []
    for part in lm.decoding_rules.parts:
        back = part.mechanism.context_length()
        found.append([max(back[h : h + shared]) + 1 for h in range(0, len(back), shared)])
    return found


class RingPart(NamedTuple):
    """Heads whose keys and values are in rings: all of a layer, or some."""

    layer: int
    first: int
    """the index of its first head in the layer"""
    mechanism: Attention


def ring_parts(blocks: Sequence[Block]) -> list[RingPart]:
    """The parts of all layers, in the order of a KV cache."""
    found = []
    for n, block in enumerate(blocks):
        mechanism, first = block.attention.mechanism, 0
        for part in mechanism.each() if isinstance(mechanism, MixedMemory) else [mechanism]:
            found += [] if remembers_itself(part, decoding=True) else [RingPart(n, first, part)]
            first += part.heads
    return found


class DecodingRules:
    """A model's current rules. They stay the same objects until a span or a position table changes, so that
    a prepared decoder can be used for many tokens."""

    def __init__(self, lm: Decoder) -> None:
        self.blocks = lm.ordered_blocks()
        self.parts = ring_parts(self.blocks)
        self.watched = [
            (module, name)
            for part in (*(block.attention.mechanism for block in self.blocks), lm.position)
            for module in part.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None  # a linear layer without bias
        ]
        self.stamp: list[tuple[int, int, int]] | None = None
        self.reach: list[list[int]] = []
        self.rules: list[AnyRule | None] = []
        self.added: list[Rule | None] = []

    def renew(self, lm: Decoder, cache: Cache) -> None:
        """See whether anything has changed, and fit the cache to it."""
        # written in place, replaced, or moved to another dtype or device
        stamp = [(id(p := getattr(module, name)), p._version, p.data_ptr()) for module, name in self.watched]
        if stamp != self.stamp:
            self.stamp, self.rules, self.reach = stamp, [None] * len(self.parts), reaches(lm)
            positions, each = lm.positions(), zip(self.parts, self.reach, strict=True)
            self.added = [_position_rule(part, positions[part.layer], max(reach)) for part, reach in each]
        cache.resize(self.reach)

    def rule(self, n: int, x: Tensor) -> AnyRule:
        """The rule of part n, for hidden states x [B, T, dim]."""
        if (known := self.rules[n]) is not None:
            return known
        mechanism, added = self.parts[n].mechanism, self.added[n]
        rule = mechanism.rule(View(x=x))
        rule = rule if added is None else rule + added
        if not rule.dynamic:
            self.rules[n] = rule
        return rule

    def rule_for(self, n: int, x: Tensor) -> RuleFor:
        """The rule of a part whose rule depends on the keys."""
        mechanism, added = self.parts[n].mechanism, self.added[n]

        def make(rows: Tensor, start: int, length: int) -> AnyRule:
            some = x[rows.to(x.device)]
            # A cache holds no hidden states: terms made of keys are those of the new ones, and the cache has noted the
            # earlier ones'.
            reads_states = mechanism.rule_needs() == "states"
            keys = some if reads_states else None
            rule = mechanism.rule(View(x=some, start=start, length=length, keys=keys))
            if reads_states and not noteworthy(rule):
                raise ValueError(
                    f"{type(mechanism).__name__} needs the hidden states of its keys, which a KV cache does not hold; "
                    "run the text by segments instead (lm(x, state))"
                )
            return rule if added is None else rule + added

        return make


def _position_rule(part: RingPart, position: Position, length: int) -> Rule | None:
    """The rule that the encoding adds for these heads, at distances 0 … length − 1."""
    rule, heads = position.rule(View(), length), part.mechanism.heads
    if rule is None or rule.heads == heads:
        return rule
    return rule.for_heads(list(range(part.first, part.first + heads)))
