"""`spanformer show PATTERN --length 64`: what heads see as a picture, with its density, cost and longest path."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import tyro

from spanformer.cli.leaf import Leaf
from spanformer.core.text import printable
from spanformer.model.kinds import is_pattern, parse_layer, parts_of

LONGEST = 1024
MOST_HEADS = 64
WIDE = 160  # tokens: more do not fit beside each other on a terminal


@dataclass(frozen=True)
class ShowOptions:
    """Show which keys each query sees, how much that costs, and over how many layers everything reaches everything.

        spanformer show "Window(8) | Global([0])"
        spanformer show "Strided(8) & Window(32)" --length 96 --no-causal
        spanformer show strided:8                          a kind, as in a run file
        spanformer show "2 window:8 + 2 dilated:4:4"       a mixture by head
        spanformer show "Window(9)" "Every(8)"             layers that take turns, as in a stack

    Patterns are sets of pairs, put together by | (either) and & (both); docs/patterns.md lists them. Those of several
    layers stand side by side, before other options. A row of the picture is a query, a column a key.
    """

    patterns: tyro.conf.Positional[tuple[str, ...]]
    """a pattern such as "Window(8) | Global([0])", or what model.attention.kind takes; several are layers in turn"""
    length: int = 64
    """tokens of the picture"""
    causal: bool = True
    """no token sees the future; --no-causal: both directions, of a kind as in an encoder"""
    dim: int = 64
    """size of a head, for its operations"""
    out: str = ""
    """file of the picture, .png or .svg; by default the pattern's name with .png in the folder out"""

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ValueError('no pattern was named; expected one such as "Window(8) | Global([0])"')
        if not 1 <= self.length <= LONGEST:
            raise ValueError(f"length is {self.length}; expected 1 … {LONGEST}, what a picture can show")
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; expected at least 1")
        if self.out and Path(self.out).suffix not in (".png", ".svg"):
            raise ValueError(f"out is {self.out!r}; expected a file that ends in .png or .svg")


def run(options: ShowOptions) -> None:
    from spanformer.report.pattern_pictures import pattern_picture
    from spanformer.report.terminal import beside, half_blocks

    layers = [visible(pattern, options.length, causal=options.causal) for pattern in options.patterns]
    if len({seen.shape[1] for seen in layers}) > 1:
        raise ValueError("some of these layers have global tokens beside the text (etc), and others do not")
    by_title = _titled(layers, options.patterns)
    if options.length <= WIDE:
        pictures = {title if len(by_title) > 1 else "": half_blocks(matrix) for title, matrix in by_title.items()}
        print(beside(pictures, shutil.get_terminal_size().columns))
    if above := layers[0].shape[1] - options.length:
        print(f"The first {above} are global tokens, beside the {options.length} of the text.")
    sentences = facts(layers, causal=options.causal, dim=options.dim, kinds=options.patterns, length=options.length)
    print("\n".join(sentences))
    together = ", ".join(options.patterns)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", together).strip("-")[:60]
    path = Path(options.out or Path("out") / f"show-{name}.png")
    picture = pattern_picture(together, by_title, " ".join(sentences[:1] + sentences[2:]), causal=options.causal)
    print(f"picture: {printable(picture.save(path))}")


def visible(pattern: str, length: int, *, causal: bool = True) -> np.ndarray:
    """[H, n, n] which keys each query sees: of a pattern, or of a layer, written as in a run file."""
    if is_pattern(pattern):
        import torch

        from spanformer.attention.pattern import parse

        at = torch.arange(length)
        found = parse(pattern).visible(at[:, None], at[None], causal=causal, length=length)
        return found.expand(length, length)[None].numpy()
    return _of_a_layer(pattern, length, causal=causal)


def facts(
    layers: Sequence[np.ndarray], *, causal: bool, dim: int, kinds: Sequence[str] = (), length: int = 0
) -> list[str]:  # fmt: skip
    """Density, cost and longest path of layers [H, n, n] that take turns, a sentence each. kinds: as a run file has
    them; one for all heads is counted by its own operations, and what else is seen by products of query and key.
    length: of the text, where global tokens stand beside it."""
    from spanformer.cost.attention import FORWARD
    from spanformer.cost.paths import longest_path
    from spanformer.report.measures import amount, percent

    heads, n = sum(len(seen) for seen in layers), layers[0].shape[1]
    pairs, allowed = sum(int(seen.sum()) for seen in layers), heads * (n * (n + 1) // 2 if causal else n * n)
    rows = [seen.sum(-1) for seen in layers]
    operations = sum(
        _operations(kind, seen, causal=causal, dim=dim, length=length or n)
        for kind, seen in zip(kinds or [""] * len(layers), layers, strict=True)
    )
    mean = pairs / (heads * n)
    each = sorted({len(seen) for seen in layers})
    where = _counted(each[0], "head") if len(each) == 1 else f"{' and '.join(map(str, each))} heads"
    where += f" in each of {len(layers)} layers" if len(layers) > 1 else ""
    said = [
        f"{pairs:,} of {allowed:,} pairs are seen, {percent(pairs / allowed)}; a query sees {mean:.1f} keys on "
        f"average, {max(row.max() for row in rows):,} at most.",
        f"{amount(operations)} FLOPs forward, {where} of {dim}; full attention takes "
        f"{amount(FORWARD * dim * allowed)}.",
    ]
    paths = longest_path([np.any(seen, axis=0).tolist() for seen in layers], causal=causal)
    if paths.whole:
        after = _counted(paths.layers, "layer")
        said.append(f"Longest path: after {after} every token has reached every other that it may.")
    else:
        share = percent(1 - paths.reached / paths.allowed)
        said.append(f"Longest path: none; {share} of the pairs are never connected, through however many layers.")
    return said


def _operations(kind: str, seen: np.ndarray, *, causal: bool, dim: int, length: int) -> int:
    """Forward, over the pairs that are seen."""
    from spanformer.cost.attention import FORWARD
    from spanformer.cost.mechanisms import MECHANISMS, Sizes

    heads, pairs = len(seen), int(seen.sum())
    parts = parse_layer(kind, heads) if kind and not is_pattern(kind) else []
    if len(parts) != 1 or parts[0].kind not in MECHANISMS:
        return FORWARD * dim * pairs
    mechanism, given = MECHANISMS[parts[0].kind], list(parts[0].numbers.values())
    own = mechanism.per_pair * dim * pairs
    if mechanism.extra is None:
        return own
    defaults = list(mechanism.numbers.values())
    numbers = [d if g is None else g for d, g in zip_longest(defaults, given)]
    return own + mechanism.extra(Sizes(length, heads, dim, causal=causal), *numbers)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _of_a_layer(kind: str, length: int, *, causal: bool) -> np.ndarray:
    """[H, n, n] of a language model's layer, or an encoder's."""
    import torch

    from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
    from spanformer.model.encoder import Encoder
    from spanformer.model.lm import LM
    from spanformer.model.looking import seen_pairs

    heads = sum(count or 0 for count, _ in parts_of(kind)) or (2 if "_heads" in kind else 1)  # whose heads differ
    if heads > MOST_HEADS:
        raise ValueError(f"{kind!r} has {heads:,} heads; expected at most {MOST_HEADS}, what a picture can show")
    attention = AttentionConfig(kind=kind, max_span=length, ramp=max(1.0, length / 16), init=0.25)
    place = PositionConfig(kind="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = ModelConfig(vocab=16, dim=16 * heads, layers=1, heads=heads, attention=attention, position=place)
        return seen_pairs(LM(config) if causal else Encoder(replace(config, kind="encoder")), length).numpy()


def _titled(layers: Sequence[np.ndarray], patterns: Sequence[str]) -> dict[str, np.ndarray]:
    """The different matrices of each layer, by the heads that have them."""
    titles = {}
    for n, (seen, pattern) in enumerate(zip(layers, patterns, strict=True), 1):
        groups: dict[bytes, list[int]] = {}
        for head, matrix in enumerate(seen):
            groups.setdefault(matrix.tobytes(), []).append(head)
        for heads in groups.values():
            named = f"head{'s' if len(heads) > 1 else ''} {', '.join(str(head + 1) for head in heads)}"
            layer = [f"layer {n}", *([pattern] if len(groups) == 1 else [named])] if len(layers) > 1 else [named]
            titles[": ".join(layer)] = seen[heads[0]]
    return titles


SHOW = Leaf(ShowOptions, run)
