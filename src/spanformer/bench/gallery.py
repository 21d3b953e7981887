"""`spanformer bench gallery`: the time of every mechanism and every position encoding, and the page that shows them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import ATTENTIONS, Attention, View
from spanformer.attention.pattern import parse
from spanformer.bench.session import Bench, BenchOptions, check_parts
from spanformer.model.build import make_position
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.position import POSITIONS

HEADS, DIM = 8, 64

# (what is drawn over 48 tokens, what is timed over 4,096), as one would write it
MADE: dict[str, tuple[str, str]] = {
    "adaptive_span": ("AdaptiveSpan(3, 48, ramp=3, init=0.3)", "AdaptiveSpan(8, 4096, init=1/16)"),
    "additive": ("Additive(Window(1, 8), 16)", "Additive(Window(8, 256), 64)"),
    "big_bird": ("BigBird(2, 4, window=3, tokens=1, random=2, causal=True)", "BigBird(8, 64, causal=True)"),
    "bilinear": ("Bilinear(Full(1), 16)", "Bilinear(Full(8), 64)"),
    "blockwise": ("Blockwise(2, 4)", "Blockwise(8, 4)"),
    "chunked": ("Chunked(Full(1))", "Chunked(Full(8))"),
    "cross": ("Cross(1)", "Cross(8)"),
    "dilated": ("DilatedWindow(2, 6, [1, 4])", "DilatedWindow(8, 256, 4)"),
    "dot": ("Dot(Full(1))", "Dot(Full(8))"),
    "dynamic_span": ("DynamicSpan(32, 2, 48, ramp=3, init=-1.0)", "DynamicSpan(512, 8, 4096, init=-2.7)"),
    "etc": ("GlobalLocal(1, 16, radius=4, segment=5, hard_g2l=True)", "GlobalLocal(8, 64, radius=128, segment=63)"),
    "expire_span": ("ExpireSpan(16, 1, 48, ramp=3, init=-1.0)", "ExpireSpan(512, 8, 4096, init=-2.7)"),
    "fixed": ("FixedSparse(1, 8, 2)", "FixedSparse(8, 64, 8)"),
    "forgetting": ("Forgetting(16, 1, 48)", "Forgetting(512, 8, 4096)"),
    "full": ("Full(1)", "Full(8)"),
    "general": ("General(Full(1), 16)", "General(Full(8), 64)"),
    "image_1d": ("ImageLocal1D(1, 8, 8)", "ImageLocal1D(8, 256, 256)"),
    "image_2d": ("ImageLocal2D(1, 12, (2, 4), (2, 2))", "ImageLocal2D(8, 64, (8, 8), (8, 8))"),
    "longformer": ("Longformer(16, 1, 8, positions=[0, 1])", "Longformer(512, 8, 256, positions=range(16))"),
    "mixed": ("Mixed([Window(1, 6), AdaptiveSpan(1, 48, ramp=3, init=0.4)])",
              "Mixed([Window(6, 64), AdaptiveSpan(2, 4096, init=0.5)])"),
    "pattern": ("Patterned(1, parse('Window(6) | Global([0]) | Random(1, size=4)'))",
                "Patterned(8, parse('Window(256) | Global([0]) | Random(2)'))"),
    "sinks": ("Sinks(Window(1, 8), kept=2)", "Sinks(Window(8, 256), kept=4)"),
    "strided": ("StridedSparse(1, 7)", "StridedSparse(8, 64)"),
    "window": ("Window(1, 8)", "Window(8, 256)"),
}  # fmt: skip


@dataclass(frozen=True)
class GalleryBench(BenchOptions):
    """Time every mechanism beside SDPA and every position encoding over none, forward and backward, 4,096 tokens, 8
    heads of 64; and write docs/gallery.md from the result file.

        spanformer bench gallery --out results/gallery.json                  all of them
        spanformer bench gallery --out results/gallery.json --names window   one, the others stay
        spanformer bench gallery --out results/gallery.json --parts page     draws and writes the page, in a clone
    """

    rounds: int = 4
    """Rounds; a mechanism and SDPA take turns in each, and medians over rounds count."""
    budget: float = 10.0
    """Seconds for one comparison: after them no new round begins, once two are done. A third of them may go into
    waiting and measuring again when other processes disturb it."""
    parts: tuple[str, ...] = ("attention", "position")
    """attention: time mechanisms; position: time position encodings; page: write the page from the result file."""
    names: tuple[str, ...] = ()
    """Which mechanisms and encodings to time. Default: all."""
    docs: Path = Path("docs")
    """Folder that the page and its pictures are written to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.parts, PARTS)
        if unknown := [name for name in self.names if name not in {**ATTENTIONS, **POSITIONS}]:
            raise ValueError(f"names holds {unknown[0]!r}; expected any of {', '.join({**ATTENTIONS, **POSITIONS})}")


def run(bench: Bench[GalleryBench]) -> None:
    for part in bench.options.parts:
        PARTS[part](bench)


def time_attention(bench: Bench[GalleryBench]) -> None:
    """Each mechanism beside SDPA over all tokens before."""
    q, k, v, view = inputs(bench)
    names = chosen(bench, list(ATTENTIONS))
    bench.plan(len(names))
    dense = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    for name in names:
        ours = functools.partial(mixed, make(MADE[name][1]), q, k, v, view)
        times = bench.compare(name, {"dense": step(dense, (q, k, v)), "ours": step(ours, (q, k, v))}, shortest=0.05)
        ratio = times["ours"].times_as_fast_as(times["dense"])
        keep(bench, "attention", name, ratio)
        bench.say(f"{name:20} {ratio:.2f} times as fast as SDPA")


def time_positions(bench: Bench[GalleryBench]) -> None:
    """Each encoding with full attention over full attention without."""
    q, k, v, view = inputs(bench)
    names, full = chosen(bench, list(POSITIONS)), make("Full(8)")
    bench.plan(len(names))
    bare = functools.partial(mixed, full, q, k, v, view)
    for name in names:
        encoding = make_position(model(heads=HEADS, head_dim=DIM, length=q.shape[2], position=name))
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
    """Beside the ratios of others that were measured at the same sizes."""
    before = bench.file.found(part) or {}
    ratios = before["ratios"] if before.get("sizes") == sizes(bench) else {}
    bench.keep(part, {"sizes": sizes(bench), "ratios": ratios | {name: ratio}})


def inputs(bench: Bench[GalleryBench]) -> tuple[Tensor, Tensor, Tensor, View]:
    length = sizes(bench)["length"]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    x = torch.randn(1, length, HEADS * DIM)
    at = torch.arange(length - length // 64)  # of ETC's: a 64th are global
    return q, k, v, View(x=x, keys=x, start=0, length=length, segments=(at // 63)[None])


def step(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], None]:
    """Forward and backward."""

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        run().square().mean().backward()

    return both


def make(text: str):
    """A mechanism from what is shown on the page, so that the page shows what was really made."""
    names = {kind.__name__: kind for kind in ATTENTIONS.values()} | {"parse": parse, "range": range}
    return eval(text, {"__builtins__": {}}, names)


def model(*, heads: int, head_dim: int, length: int, position: str = "none") -> ModelConfig:
    """One layer of full attention with these positions."""
    place = PositionConfig(kind=position, length=length if "learned" in position else 0)  # pyright: ignore
    attention = AttentionConfig(kind="full", max_span=length)
    return ModelConfig(vocab=16, dim=heads * head_dim, layers=1, heads=heads, attention=attention, position=place)


def mixed(mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    return mechanism.mix(mechanism.map_queries(q), k, v, mechanism.rule(view), view).out


def with_position(encoding, mechanism, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    turned = encoding.turn(q, k, view)
    added, rule = encoding.rule(view, q.shape[2]), mechanism.rule(view)
    return mechanism.mix(*turned, v, rule if added is None else rule + added, view).out
