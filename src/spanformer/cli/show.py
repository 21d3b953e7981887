"""`spanformer show PATTERN --length 64`: draw which keys heads see; print density, cost and longest path."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from spanformer.cli.command import Command
from spanformer.core.text import printable
from spanformer.kinds.notation import is_pattern, split_parts

LONGEST = 1024
MOST_HEADS = 64
WIDE = 160  # tokens: more do not fit the width of a terminal


@dataclass(frozen=True)
class ShowOptions:
    """Draw which keys each query sees; print the cost, and after how many layers every token reaches every other.

        spanformer show "Window(8) | Global([0])"
        spanformer show "Strided(8) & Window(32)" --length 96 --no-causal
        spanformer show "strided(8)"                       a kind, as in a run file
        spanformer show "2 window(8) + 2 dilated(4, 4)"    a mixture by head
        spanformer show "Window(9)" "Every(8)"             layers that alternate, as in a stack

    Patterns are sets of pairs, combined by | (either) and & (both); docs/patterns.md lists them. Give the patterns of
    several layers before other options. A row of the picture is a query, a column a key.
    """

    patterns: tyro.conf.Positional[tuple[str, ...]]
    """a pattern such as "Window(8) | Global([0])", or a value of model.attention.kind; several: alternating layers"""
    length: int = 64
    """tokens in the picture"""
    causal: bool = True
    """hide the future from every token; --no-causal: both directions, as in an encoder"""
    dim: int = 64
    """size of a head, for counting FLOPs"""
    out: str = ""
    """picture file, .png or .svg; by default the pattern's name with .png in the folder out"""

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ValueError('no pattern is given; expected one such as "Window(8) | Global([0])"')
        if not 1 <= self.length <= LONGEST:
            raise ValueError(f"length is {self.length}; expected 1 … {LONGEST}, the limit of a picture")
        if self.dim < 1:
            raise ValueError(f"dim is {self.dim}; expected at least 1")
        if self.out and Path(self.out).suffix not in (".png", ".svg"):
            raise ValueError(f"out is {self.out!r}; expected a file that ends in .png or .svg")


def run(options: ShowOptions) -> None:
    from spanformer.report.pattern_pictures import pattern_picture
    from spanformer.report.terminal import beside, half_blocks

    layers = [visible(pattern, options.length, causal=options.causal) for pattern in options.patterns]
    if len({seen.shape[1] for seen in layers}) > 1:
        raise ValueError("some layers have global tokens beside the text (etc) and others do not; expected all or none")
    by_title = _titled(layers, options.patterns)
    if options.length <= WIDE:
        pictures = {title if len(by_title) > 1 else "": half_blocks(matrix) for title, matrix in by_title.items()}
        print(beside(pictures, shutil.get_terminal_size().columns))
    if above := layers[0].shape[1] - options.length:
        print(f"The first {above} tokens are global, followed by the {options.length} of the text.")
    sentences = facts(layers, causal=options.causal, dim=options.dim, kinds=options.patterns, length=options.length)
    print("\n".join(sentences))
    together = ", ".join(options.patterns)
    name = re.sub(r"[^A-Za-z0-9_]+", "-", together).strip("-")[:60]
    path = Path(options.out or Path("out") / f"show-{name}.png")
    picture = pattern_picture(together, by_title, " ".join(sentences[:1] + sentences[2:]), causal=options.causal)
    print(f"picture: {printable(picture.save(path))}")


def visible(pattern: str, length: int, *, causal: bool = True) -> np.ndarray:
    """Which keys each query sees, [H, n, n]. pattern: a pattern, or a kind as in a run file."""
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
    """Density, cost and longest path of alternating layers [H, n, n], a sentence each. kinds: as in a run file; a kind
    for all heads is counted by its own operations, everything else by query–key products.
    length: tokens of the text, if global tokens are added to it."""
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
        f"{pairs:,} of {allowed:,} pairs are visible, {percent(pairs / allowed)}; a query sees {mean:.1f} keys on "
        f"average, {max(row.max() for row in rows):,} at most.",
        f"{amount(operations)} FLOPs forward, {where} of {dim}; full attention takes "
        f"{amount(FORWARD * dim * allowed)}.",
    ]
    paths = longest_path([np.any(seen, axis=0).tolist() for seen in layers], causal=causal)
    if paths.whole:
        after = _counted(paths.layers, "layer")
        said.append(f"Longest path: after {after} every token has reached every other it may see.")
    else:
        share = percent(1 - paths.reached / paths.allowed)
        said.append(f"Longest path: none; {share} of the pairs are never connected, with any number of layers.")
    return said


def _operations(kind: str, seen: np.ndarray, *, causal: bool, dim: int, length: int) -> int:
    """Forward FLOPs over the visible pairs."""
    from types import SimpleNamespace

    from spanformer.cost.attention import FORWARD
    from spanformer.cost.sizes import Sizes
    from spanformer.kinds.costs import price

    heads, pairs = len(seen), int(seen.sum())
    if not kind or is_pattern(kind) or len(split_parts(kind)) != 1:
        return FORWARD * dim * pairs
    priced = price(split_parts(kind)[0].text, length)
    extra = priced.cost.extra
    sizes = Sizes(length, heads, dim, causal=causal)
    return priced.cost.per_pair * dim * pairs + (extra(sizes, SimpleNamespace(**priced.params)) if extra else 0)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _of_a_layer(kind: str, length: int, *, causal: bool) -> np.ndarray:
    """Visible pairs of a language model's layer (causal) or an encoder's, [H, n, n]."""
    import torch

    from spanformer.inspect.attention_maps import seen_pairs
    from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
    from spanformer.model.encoder import Encoder
    from spanformer.model.lm import LM

    heads = sum(part.heads or 0 for part in split_parts(kind)) or (
        2 if "_heads" in kind else 1
    )  # `_heads` kinds: heads differ
    if heads > MOST_HEADS:
        raise ValueError(f"{kind!r} has {heads:,} heads; expected at most {MOST_HEADS}, the limit of a picture")
    attention = AttentionConfig(kind=kind, max_span=length, ramp=max(1.0, length / 16), init=0.25)
    place = PositionConfig(kind="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = ModelConfig(vocab=16, dim=16 * heads, layers=1, heads=heads, attention=attention, position=place)
        return seen_pairs(LM(config) if causal else Encoder(replace(config, kind="encoder")), length).numpy()


def _titled(layers: Sequence[np.ndarray], patterns: Sequence[str]) -> dict[str, np.ndarray]:
    """The distinct matrices of each layer, by a title that names their heads."""
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


SHOW = Command(ShowOptions, run)
