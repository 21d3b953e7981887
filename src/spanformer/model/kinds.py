"""Which attention mechanisms a model can be made of, and how a run file writes them down.

    adaptive_span                       all heads of a layer
    window:128                          with its numbers
    6 window:64 + 2 adaptive_span       a mixture by head
    Window(64) | Global([0])            any pattern of attention/pattern.py, which begins with a capital letter

No torch here: the command line reads this table for its help.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    help: str
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    """what may follow the name, in this order, with defaults; None: as the [model.attention] section says"""


KINDS: dict[str, Kind] = {
    "adaptive_span": Kind("each head learns how far it looks"),
    "dynamic_span": Kind("each token and head chooses how far it looks"),
    "window": Kind("a fixed number of tokens", {"window": None}),
    "full": Kind("everything up to max_span"),
    "dilated": Kind("a window of every step-th token", {"window": None, "step": 2}),
    "strided": Kind("the last step tokens and every step-th (Sparse Transformer), merged", {"step": 64}),
    "strided_heads": Kind("the same, half of the heads each", {"step": 64}),
    "fixed": Kind("the token's block and the last tokens of every block (Sparse Transformer)", {"size": 64, "last": 4}),
    "fixed_heads": Kind("the same, half of the heads each", {"size": 64, "last": 4}),
    "image_1d": Kind("the token's block and so many tokens before it", {"block": 64, "memory": 64}),
    "image_2d": Kind(
        "the token's block of an image and what is around it",
        {"width": 32, "high": 8, "wide": 8, "above": 8, "beside": 8},
    ),
    "blockwise": Kind("one block of keys, by a permutation of the head's own", {"blocks": 4, "size": 64}),
    "big_bird": Kind(
        "blocks around the token, first ones, and random ones", {"block": 16, "window": 3, "tokens": 1, "random": 2}
    ),
    "expire_span": Kind("each token chooses how long it is remembered, by all heads"),
    "forgetting": Kind("each token and head forgets some of what came before; no positions needed"),
    "sink_window": Kind("a window, a learned sink, and the text's first tokens", {"window": None, "kept": 0}),
    "sink_span": Kind("learned spans, a learned sink, and the text's first tokens", {"kept": 0}),
    "dot": Kind("everything up to max_span, scored by q·k (Luong)"),
    "general": Kind("everything up to max_span, scored by q·W·k (Luong)"),
    "bilinear": Kind("everything up to max_span, scored by (q·W + w)·k"),
    "additive": Kind("everything up to max_span, scored by v·tanh(W·q + U·k) (Bahdanau)"),
    "chunked": Kind("everything up to max_span, by chunks in plain PyTorch"),
    "longformer": Kind(
        "a window, and the first tokens of a text global, with projections of their own",
        {"window": None, "globals": 0, "dilation": 1},
    ),
    "etc": Kind(
        "of an encoder: so many tokens to either side, and a global token for each segment of so many (ETC)",
        {"radius": 32, "segment": 16, "clip": 12, "hard": 0},
    ),
    "etc_apart": Kind(
        "the same, with projections of their own for what global tokens see and show",
        {"radius": 32, "segment": 16, "clip": 12, "hard": 0},
    ),
}
MOST = 1 << 31
"""of any size: the product of two is then still one that tensors hold"""
PATTERN = "pattern"
"""the kind of heads that are written as an expression"""


@dataclass(frozen=True)
class HeadKind:
    """Some heads of a layer, all of one kind."""

    kind: str
    heads: int
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    """by name, every one that the kind has"""
    text: str = ""
    """the expression of a pattern"""

    def number(self, name: str, section: int = 0) -> int:
        """section: what [model.attention] says, for a number that was left out. A 0 that was written stays one."""
        found = self.numbers[name]
        return section if found is None else found


def parts_of(text: str) -> list[tuple[int | None, str]]:
    """'6 window:64 + 2 adaptive_span' as (6, 'window:64') and (2, 'adaptive_span'); None where no heads are counted."""
    found = (re.fullmatch(r"\s*(?:(\d+)\s+)?(.*?)\s*", part, re.DOTALL) for part in text.split("+"))
    return [(int(part[1]) if part[1] else None, part[2]) for part in found if part]


def is_pattern(text: str) -> bool:
    """Patterns begin with a capital letter, kinds with a small one."""
    return re.match(r"[\s(]*[A-Z]", text) is not None


def parse_layer(text: str, heads: int, where: str = "model.attention.stack") -> list[HeadKind]:
    """'6 window:64 + 2 adaptive_span' as its parts; a part without a number of heads is all of them."""
    parts = [_parse_part(part, text, heads if count is None else count, where) for count, part in parts_of(text)]
    if sum(part.heads for part in parts) != heads:
        raise ValueError(f"{where} holds {text!r}, {sum(part.heads for part in parts)} heads; expected {heads}")
    return parts


def _parse_part(part: str, text: str, heads: int, where: str) -> HeadKind:
    if is_pattern(part):
        return HeadKind(PATTERN, heads, text=part)
    found = re.fullmatch(r"([a-z]\w*)((?::\d+)*)", part)
    if found is None or found[1] not in KINDS:
        raise ValueError(
            f"{where} holds {text!r}; expected kinds such as 'window:128', 'adaptive_span' or "
            "'6 window:64 + 2 adaptive_span', or a pattern such as 'Window(64) | Global([0])' "
            f"(kinds: {', '.join(KINDS)})"
        )
    known = KINDS[found[1]].numbers
    given = found[2].split(":")[1:]
    if long := [n for n in given if len(n) > len(str(MOST)) or int(n) > MOST]:
        raise ValueError(f"{where} holds {text!r}; expected numbers up to {MOST:,}, not {long[0]}")
    if len(given) > len(known):
        takes = f"takes {' and '.join(known)}" if known else "takes no number"
        raise ValueError(f"{where} holds {text!r}; {found[1]} {takes}")
    return HeadKind(
        found[1], heads, dict(zip(known, [*map(int, given), *list(known.values())[len(given) :]], strict=True))
    )
