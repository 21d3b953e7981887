"""`spanformer bench gallery`: time every mechanism and position encoding, and write the gallery page."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import Attention, View
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.kinds import KINDS, POSITIONS
from spanformer.kinds.notation import split_parts
from spanformer.model.build import make_mechanism, make_position
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig

HEADS, DIM = 8, 64


@dataclass(frozen=True)
class Shown:
    """One entry of the gallery."""

    drawn: str
    """kind as in a run file, for a picture of 48 tokens"""
    timed: str
    """the same for timing with 4,096 tokens"""
    about: str
    """module:name of the class whose file describes it"""
    keys: str
    """number of keys that a query sees"""


COMPOSED = {
    "mixed": Shown(
        "1 window(6) + 1 adaptive_span", "6 window(64) + 2 adaptive_span", "spanformer.attention.mixed:Mixed",
        'those of each part for its heads (`spanformer cost --kinds "10 window(64) + 2 adaptive_span(span=1000)"`)',
    ),
    "pattern": Shown(
        "Window(6) | Global([0]) | Random(1, size=4)", "Window(256) | Global([0]) | Random(2)",
        "spanformer.attention.patterned:Patterned",
        'those that the pattern holds, counted (`spanformer cost --kinds "Window(256) | Global([0])"`)',
    ),
}  # fmt: skip
"""entries made of several kinds or of an expression"""


def entries() -> dict[str, Shown]:
    """All entries of the gallery: every kind of self-attention, and compositions of them."""
    kinds = {
        name: Shown(kind.drawn, kind.timed, kind.build, f"{kind.cost.keys} ({kind.help})")
        for name, kind in KINDS.items()
    }
    return kinds | COMPOSED


@dataclass(frozen=True)
class GalleryBench(BenchOptions):
    """Time every mechanism against SDPA and every position encoding against none, forward and backward, with 4,096
    tokens and 8 heads of 64; and write docs/gallery.md from the result file.

        spanformer bench gallery --out docs/results/gallery.json                  all of them
        spanformer bench gallery --out docs/results/gallery.json --names window   one, the others stay
        spanformer bench gallery --out docs/results/gallery.json --parts page     draws and writes the page, in a clone
    """

    rounds: int = 4
    """Rounds; each times a mechanism and SDPA in turn, and results are medians over rounds."""
    budget: float = 10.0
    """Seconds per comparison: after this time no new round begins, once two are done. Up to a third is spent on
    waiting and repeating when other processes disturb a measurement."""
    parts: tuple[str, ...] = ("attention", "position")
    """attention: time mechanisms; position: time position encodings; page: write the page from the result file."""
    names: tuple[str, ...] = ()
    """Mechanisms and encodings to time. Default: all."""
    docs: Path = Path("docs")
    """Folder for the page and its pictures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if unknown := [name for name in self.names if name not in {**entries(), **POSITIONS}]:
            raise ValueError(f"names holds {unknown[0]!r}; expected any of {', '.join({**entries(), **POSITIONS})}")


def run(bench: Bench[GalleryBench]) -> None:
    for part in bench.options.parts:
        PARTS[part](bench)


def time_attention(bench: Bench[GalleryBench]) -> None:
    """Time each mechanism against SDPA with full causal attention."""
    q, k, v, view = inputs(bench)
    names = chosen(bench, [name for name, shown in entries().items() if shown.timed])
    bench.plan(len(names))
    dense = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    for name in names:
        ours = functools.partial(attended, make(entries()[name].timed, q.shape[2]), q, k, v, view)
        times = bench.compare(name, {"dense": step(dense, (q, k, v)), "ours": step(ours, (q, k, v))}, shortest=0.05)
        ratio = times["ours"].times_as_fast_as(times["dense"])
        keep(bench, "attention", name, ratio)
        bench.say(f"{name:20} {ratio:.2f} times as fast as SDPA")


def time_positions(bench: Bench[GalleryBench]) -> None:
    """Time full attention with each encoding against full attention without one."""
    q, k, v, view = inputs(bench)
    names, full = chosen(bench, list(POSITIONS)), make("full", q.shape[2])
    bench.plan(len(names))
    bare = functools.partial(attended, full, q, k, v, view)
    for name in names:
        encoding = make_position(model("full", heads=HEADS, head_dim=DIM, length=q.shape[2], position=name))
        placed = functools.partial(with_position, encoding, full, q, k, v, view)
        times = bench.compare(name, {"bare": step(bare, (q, k, v)), "placed": step(placed, (q, k, v))}, shortest=0.05)
        ratio = times["bare"].times_as_fast_as(times["placed"])
        keep(bench, "position", name, ratio)
        bench.say(f"{name:20} {ratio:.2f} times the time without")


def write_docs(bench: Bench[GalleryBench]) -> None:
    from spanformer.bench.gallery_page import write_page

    if missing := [part for part in ("attention", "position") if bench.file.found(part) is None]:
        raise ValueError(f"{bench.file.path} holds no part {missing[0]}; measure it first with --parts {missing[0]}")
    bench.say(f"wrote {write_page(bench.file.parts, bench.options.docs, bench.report)} and its pictures")


PARTS: dict[str, Callable[[Bench[GalleryBench]], None]] = {
    "attention": time_attention, "position": time_positions, "page": write_docs,
}  # fmt: skip
OPTIONS = GalleryBench


def chosen(bench: Bench[GalleryBench], known: list[str]) -> list[str]:
    return [name for name in known if name in bench.options.names or not bench.options.names]


def sizes(bench: Bench[GalleryBench]) -> dict[str, int]:
    return {"length": bench.options.size(4096, 128), "heads": HEADS, "dim": DIM}


def keep(bench: Bench[GalleryBench], part: str, name: str, ratio: float) -> None:
    """Add the ratio to the others measured at the same sizes."""
    before = bench.file.found(part) or {}
    ratios = before["ratios"] if before.get("sizes") == sizes(bench) else {}
    bench.keep(part, {"sizes": sizes(bench), "ratios": ratios | {name: ratio}})


def inputs(bench: Bench[GalleryBench]) -> tuple[Tensor, Tensor, Tensor, View]:
    length = sizes(bench)["length"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    x = torch.randn(1, length, HEADS * DIM)
    at = torch.arange(length - length // 64)  # ETC has one global token per 64
    return q, k, v, View(x=x, keys=x, start=0, length=length, segments=(at // 63)[None])


def step(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward and backward."""

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        run().square().mean().backward()

    return both


def make(text: str, length: int) -> Attention:
    """The mechanism of a layer with 8 heads of 64; a kind that cannot be causal gets an encoder's layer."""
    config = model(text, heads=HEADS, head_dim=DIM, length=length, init=1 / 16)
    return make_mechanism(config, config.layer_specs()[0])


def model(
    kind: str, *, heads: int, head_dim: int, length: int, position: str = "none", ramp: float = 32.0, init: float = 0.0
) -> ModelConfig:
    """A model of one layer with this attention and position encoding, for texts of this length."""
    place = PositionConfig(kind=position, length=length if POSITIONS[position].needs_length else 0)
    attention = AttentionConfig(kind=kind, max_span=length, ramp=ramp, init=init)
    first = split_parts(kind)[0].text.partition("(")[0]
    decodes = first not in KINDS or KINDS[first].cost.cached is not None
    return ModelConfig(
        vocab=16, dim=heads * head_dim, layers=1, heads=heads, attention=attention, position=place,
        kind="lm" if decodes else "encoder",
    )  # fmt: skip


def attended(mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    found = mechanism(mechanism.map_queries(q), k, v, mechanism.rule(view), view).out
    mechanism.learn_from(torch.zeros(len(q), q.shape[2]), torch.ones(len(q), q.shape[2]))
    return found


def with_position(encoding, mechanism, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    turned = encoding.encode(q, k, view)
    added, rule = encoding.rule(view, q.shape[2]), mechanism.rule(view)
    return mechanism(*turned, v, rule if added is None else rule + added, view).out
