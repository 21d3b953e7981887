"""Every mechanism and every position encoding on one page: picture, equation, cost by formula and measured.

    python benchmarks/gallery.py measure [NAME …]      times all or some, into results/gallery.json
    python benchmarks/gallery.py                       draws and writes docs/gallery.md from code and results

What stands on the page comes from the code: the equation from the file that implements it, the picture from a model of
random weights, the formula from spanformer.cost.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import ATTENTIONS, Attention, View
from spanformer.attention.pattern import parse
from spanformer.cli.show import facts, seen_in
from spanformer.core.malloc import keep_freed_memory
from spanformer.cost.mechanisms import MECHANISMS
from spanformer.cost.positions import POSITION_COSTS
from spanformer.model.build import make_position
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.looking import attention_maps
from spanformer.position import POSITIONS
from spanformer.report.drawing import subplots
from spanformer.report.heatmap_pictures import draw_weights
from spanformer.report.pattern_pictures import draw_pattern

ROOT = Path(__file__).resolve().parents[1]
PAGE, IMAGES, RESULTS = (
    ROOT / "docs" / "gallery.md",
    ROOT / "docs" / "img" / "gallery",
    ROOT / "results" / "gallery.json",
)
SHOWN, LENGTH, HEADS, DIM, ROUNDS, LONG = 48, 4096, 8, 64, 4, 4.0

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


COMPOSED = {
    "mixed": 'those of each part for its heads (`spanformer cost --kinds "10 window:64 + 2 adaptive_span:1000:32"`)',
    "pattern": 'those that the pattern holds, counted (`spanformer cost --kinds "Window(256) | Global([0])"`)',
}
"""whose cost is that of what they are made of"""


def make(text: str):
    """A mechanism from what is shown on the page, so that the page shows what was really made."""
    names = {kind.__name__: kind for kind in ATTENTIONS.values()} | {"parse": parse, "range": range}
    return eval(text, {"__builtins__": {}}, names)


def model(*, heads: int, head_dim: int, length: int, position: str = "none") -> ModelConfig:
    """One layer of full attention with these positions."""
    place = PositionConfig(kind=position, length=length if "learned" in position else 0)  # pyright: ignore
    attention = AttentionConfig(kind="full", max_span=length)
    return ModelConfig(vocab=16, dim=heads * head_dim, layers=1, heads=heads, attention=attention, position=place)


def told(module_of: type) -> tuple[str, str]:
    """(what a file says it is, its equations) from its first lines."""
    module = inspect.getmodule(module_of)
    text = inspect.cleandoc((module.__doc__ if module else "") or "")
    paragraphs = re.split(r"\n\s*\n", text)
    formulas = [p for p in paragraphs if all(line.startswith("  ") for line in p.split("\n"))]
    if not formulas and len(paragraphs) > 1 and re.search(r"[=∝∈]", paragraphs[1].split("\n")[0]):
        formulas = [paragraphs[1]]
    before = paragraphs[: paragraphs.index(formulas[0])] if formulas else paragraphs[:1]
    title = " ".join(" ".join(before).split())
    return title, _of_one(module_of.__name__, "\n".join(textwrap.dedent(formula) for formula in formulas))


def _of_one(name: str, equations: str) -> str:
    """Where a file has a line for each of several, that of one."""
    lines, found = equations.split("\n"), []
    for line in lines:
        if line.split(" ")[0] == name or (found and line.startswith(" ")):
            found.append(line)
        elif found:
            break
    return "\n".join(found or lines)


def draw_attention(name: str) -> list[str]:
    """The picture of a mechanism, and what is to be seen in it."""
    torch.manual_seed(0)
    if name == "cross":  # no layer of one text alone
        seen = np.ones((1, SHOWN, SHOWN), bool)
    else:
        mechanism = make(MADE[name][0])
        config = model(heads=mechanism.heads, head_dim=16, length=SHOWN)
        if name == "etc":  # global tokens are an encoder's
            config = replace(config, kind="encoder", attention=AttentionConfig(kind=f"etc:1:{mechanism.segment}"))
        lm = Encoder(config) if name == "etc" else LM(config)
        lm.blocks[0].attention.mechanism = mechanism  # pyright: ignore[reportArgumentType]
        seen = seen_in(lm, SHOWN * 5 // 6 if name == "etc" else SHOWN)
    causal = not bool(np.triu(seen.any(0), 1).any())
    different = list({matrix.tobytes(): matrix for matrix in seen}.values())[:3]
    figure, axes = subplots(1, len(different), width=0.35 + 2.1 * len(different), height=2.35)
    for axis, matrix in zip(axes[0], different, strict=True):
        draw_pattern(axis, matrix, causal=causal)
    figure.tight_layout(pad=0.4)
    figure.savefig(IMAGES / f"{name}.png", dpi=90)
    return facts([seen], causal=causal, dim=DIM)


def draw_position(name: str) -> None:
    """Where a head looks when all tokens are the same, so that position is all there is to go by."""
    torch.manual_seed(4)
    lm = LM(model(heads=4, head_dim=16, length=SHOWN, position=name)).double()
    with torch.no_grad():
        for p in lm.positions()[0].parameters():  # what starts at zero has no opinion yet
            p.add_(torch.randn_like(p), alpha=0.7)
        attention = lm.blocks[0].attention
        for linear in (attention.query, attention.key):
            linear.weight.mul_(2)
    (maps,) = attention_maps(lm, torch.zeros(SHOWN, dtype=torch.long))
    figure, axes = subplots(1, 2, width=4.5, height=2.35)
    for axis, weights in zip(axes[0], maps[:2].numpy(), strict=True):
        draw_weights(axis, weights / weights.max(-1, keepdims=True))
        axis.set_xticks([])
        axis.set_yticks([])
    figure.tight_layout(pad=0.4)
    figure.savefig(IMAGES / f"position-{name}.png", dpi=90)


def page(results: dict) -> str:
    """docs/gallery.md."""
    timed = results["sizes"]
    lines = [
        "# Gallery",
        "",
        "Every mechanism and every position encoding, from the code: `python benchmarks/gallery.py` writes this page.",
        "A picture shows which keys (columns) each query (row) sees; grey is the future. What one costs at any size:",
        "[cost](cost.md); any composition as a picture: `spanformer show`.",
        "",
        f"Times are forward and backward of the operation alone, {timed['length']:,} tokens, {timed['heads']} heads of",
        f"{timed['dim']}, float32, {timed['threads']} threads, beside PyTorch's full causal attention (SDPA) in the",
        f"same run ({results['date']}).",
        "",
        "## Mechanisms",
        "",
    ]
    for name, kind in ATTENTIONS.items():
        found, cost = results["attention"].get(name), MECHANISMS.get(name)
        lines += [*_head(name, kind, f"what {name} sees", name), f"Drawn: `{MADE[name][0]}`."]
        if cost and cost.pairs:
            lines.append(f"Keys a query sees: {cost.formula} ({cost.about}).")
        elif name in COMPOSED:
            lines.append(f"Keys a query sees: {COMPOSED[name]}.")
        if found:
            lines.append(f"Measured: `{MADE[name][1]}` is {speed(found['ratio'])}.")
        lines.append("")
    lines += ["## Positions", "", "Two heads of random weights over a text of equal tokens, each row relative to its",
              "largest weight: what is to be seen is position alone.", ""]  # fmt: skip
    for name, kind in POSITIONS.items():
        found = results["position"].get(name)
        lines += [*_head(name, kind, f"where {name} looks", f"position-{name}"), f"Cost: {POSITION_COSTS[name]}."]
        if found:
            lines.append(f"Measured: {found['ratio']:.2f} times the time of full attention without positions.")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _head(name: str, kind: type, alt: str, image: str) -> list[str]:
    """Name, what it is, picture and equation."""
    title, equation = told(kind)
    lines = [f"### {name}", "", *textwrap.wrap(title, 120), "", f"![{alt}](img/gallery/{image}.png)", ""]
    return [*lines, "```", equation, "```", ""] if equation else lines


def speed(ratio: float) -> str:
    return f"{ratio:.1f} times as fast as SDPA" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as SDPA"


def measure(names: list[str], results: dict) -> dict:
    """Ratios of times, each of a mechanism and SDPA in turn; over those known before."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    x = torch.randn(1, LENGTH, HEADS * DIM)
    at = torch.arange(LENGTH - LENGTH // 64)  # of ETC's: a 64th are global
    view = View(x=x, keys=x, start=0, length=LENGTH, segments=(at // 63)[None])
    dense = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    found: dict = {"attention": {}, "position": {}} | results
    for name in (name for name in ATTENTIONS if name in names or not names):
        mechanism = make(MADE[name][1])
        ours = lambda mechanism=mechanism: mixed(mechanism, q, k, v, view)  # noqa: E731
        found["attention"][name] = {"ratio": ratio(dense, ours, (q, k, v))}
        print(f"{name:20} {found['attention'][name]['ratio']:.2f} times as fast as SDPA", flush=True)
    full = make("Full(8)")
    for name in (name for name in POSITIONS if name in names or not names):
        encoding = make_position(model(heads=HEADS, head_dim=DIM, length=LENGTH, position=name))
        bare = lambda: mixed(full, q, k, v, view)  # noqa: E731
        placed = lambda encoding=encoding: with_position(encoding, full, q, k, v, view)  # noqa: E731
        found["position"][name] = {"ratio": ratio(placed, bare, (q, k, v))}
        print(f"{name:20} {found['position'][name]['ratio']:.2f} times the time without", flush=True)
    sizes = {"length": LENGTH, "heads": HEADS, "dim": DIM, "threads": torch.get_num_threads()}
    return found | {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "sizes": sizes}


def mixed(mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    return mechanism.mix(mechanism.map_queries(q), k, v, mechanism.rule(view), view).out


def with_position(encoding, mechanism, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    turned = encoding.turn(q, k, view)
    added, rule = encoding.rule(view, LENGTH), mechanism.rule(view)
    return mechanism.mix(*turned, v, rule if added is None else rule + added, view).out


def ratio(slow: Callable[[], Tensor], fast: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> float:
    """How many times as long the first takes as the second, each at its best of a few rounds in turn; what takes
    seconds is timed once."""
    rounds = ROUNDS if seconds(fast, leaves) + seconds(slow, leaves) < LONG else 1
    times = [(seconds(slow, leaves), seconds(fast, leaves)) for _ in range(rounds)]
    return min(time for time, _ in times) / min(time for _, time in times)


def seconds(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> float:
    for leaf in leaves:
        leaf.grad = None
    began = time.perf_counter()
    run().square().mean().backward()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] == "measure":
        names = arguments[1:]
        if unknown := set(names) - set(ATTENTIONS) - set(POSITIONS):
            raise SystemExit(f"there is no {' and no '.join(sorted(unknown))}; expected names of the gallery")
        torch.set_num_threads(2)
        keep_freed_memory(True)
        before = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps(measure(names, before), indent=1) + "\n", encoding="utf-8")
        return
    if arguments:
        raise SystemExit(f"{arguments[0]!r} is not understood; expected nothing, or measure")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    IMAGES.mkdir(parents=True, exist_ok=True)
    for old in IMAGES.glob("*.png"):
        old.unlink()
    for name in ATTENTIONS:
        draw_attention(name)
    for name in POSITIONS:
        draw_position(name)
    PAGE.write_text(page(results), encoding="utf-8")
    print(f"wrote {PAGE} and {len(ATTENTIONS) + len(POSITIONS)} pictures")


if __name__ == "__main__":
    main(sys.argv[1:])
