"""Every mechanism and every position encoding on one page: picture, equation, cost by formula and measured.

    python benchmarks/gallery.py measure      times each once more, into results/gallery.json
    python benchmarks/gallery.py              draws docs/img/gallery and writes docs/gallery.md from code and results

What stands on the page comes from the code: the equation from the file that implements it, the picture from a model of
random weights, the formula from spanformer.cost.
"""

from __future__ import annotations

import inspect
import json
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from spanformer.attention import ATTENTIONS, View
from spanformer.cli.show import facts, visible
from spanformer.cost.mechanisms import MECHANISMS
from spanformer.cost.positions import POSITION_COSTS
from spanformer.model.build import make_block, make_position
from spanformer.model.config import AttentionConfig, ModelConfig, PositionConfig
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
SHOWN, LENGTH, HEADS, DIM, ROUNDS = 48, 4096, 8, 64, 3

SMALL: dict[str, str] = {
    "adaptive_span": "3 adaptive_span", "window": "window:8", "longformer": "longformer:8:2",
    "mixed": "2 window:6 + 1 adaptive_span",
}  # fmt: skip
"""what is drawn of a mechanism, as a run file writes it, where its bare name is not meant"""
LARGE: dict[str, str] = {
    "window": "window:256", "longformer": "longformer:256:16", "mixed": "6 window:64 + 2 adaptive_span",
}  # fmt: skip
"""what is timed"""


def model(
    kind: str, *, length: int, heads: int, head_dim: int, position: str = "none", init: float = 0.25
) -> ModelConfig:
    attention = AttentionConfig(kind=kind, max_span=length, ramp=max(1.0, min(32.0, length / 16)), init=init)
    place = PositionConfig(kind=position)  # pyright: ignore[reportArgumentType]
    return ModelConfig(
        vocab=2, dim=heads * head_dim, layers=1, heads=heads, attention=attention, position=place
    )  # fmt: skip


def told(module_of: type) -> tuple[str, str]:
    """(what a file says it is, its equations) from its first lines."""
    module = inspect.getmodule(module_of)
    text = inspect.cleandoc((module.__doc__ if module else "") or "")
    paragraphs = re.split(r"\n\s*\n", text)
    title = " ".join(paragraphs[0].split())
    formulas = [p for p in paragraphs if all(line.startswith("  ") for line in p.split("\n"))]
    if not formulas and len(paragraphs) > 1 and re.search(r"[=∝∈]", paragraphs[1].split("\n")[0]):
        formulas = [paragraphs[1]]
    return title, "\n".join(textwrap.dedent(formula) for formula in formulas)


def draw_attention(name: str) -> list[str]:
    """The picture of a mechanism, and what is to be seen in it."""
    seen = visible(SMALL.get(name, name), SHOWN)
    different = list({matrix.tobytes(): matrix for matrix in seen}.values())[:3]
    figure, axes = subplots(1, len(different), width=0.35 + 2.1 * len(different), height=2.35)
    for axis, matrix in zip(axes[0], different, strict=True):
        draw_pattern(axis, matrix, causal=True)
    figure.tight_layout(pad=0.4)
    figure.savefig(IMAGES / f"{name}.png", dpi=90)
    return facts(seen, causal=True, dim=DIM)


def draw_position(name: str) -> None:
    """Where a head looks when all tokens are the same, so that position is all there is to go by."""
    torch.manual_seed(4)
    lm = LM(model("full", length=SHOWN, heads=4, head_dim=16, position=name)).double()
    with torch.no_grad():
        for p in lm.position.parameters():  # what starts at zero has no opinion yet
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
        lines += [*_head(name, kind, f"what {name} sees", name), f"Drawn: `{SMALL.get(name, name)}`."]
        if cost and cost.pairs:
            lines.append(f"Keys a query sees: {cost.formula} ({cost.about}).")
        if found:
            lines.append(f"Measured, `{found['kind']}`: {speed(found['ratio'])}.")
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


def measure() -> dict:
    """Ratios of times, each of a mechanism and SDPA in turn, the median of a few rounds."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3))
    x = torch.randn(1, LENGTH, HEADS * DIM)
    view = View(x=x, keys=x, start=0, length=LENGTH)
    dense = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    attention, position = {}, {}
    for name in ATTENTIONS:
        kind = LARGE.get(name, name)
        config = model(kind, length=LENGTH, heads=HEADS, head_dim=DIM, init=256 / LENGTH)
        mechanism = make_block(config, config.stack()[0]).attention.mechanism
        ours = lambda mechanism=mechanism: mechanism.mix(q, k, v, mechanism.rule(view), view).out  # noqa: E731
        attention[name] = {"kind": kind, "ratio": ratio(dense, ours, (q, k, v))}
        print(f"{name:20} {attention[name]['ratio']:.2f} × SDPA", flush=True)
    config = model("full", length=LENGTH, heads=HEADS, head_dim=DIM)
    mechanism = make_block(config, config.stack()[0]).attention.mechanism
    for name in POSITIONS:
        encoding = make_position(model("full", length=LENGTH, heads=HEADS, head_dim=DIM, position=name))
        bare = lambda: mechanism.mix(q, k, v, mechanism.rule(view), view).out  # noqa: E731
        placed = lambda encoding=encoding: with_position(encoding, mechanism, q, k, v, view)  # noqa: E731
        position[name] = {"ratio": ratio(placed, bare, (q, k, v))}
        print(f"{name:20} {position[name]['ratio']:.2f} × the time without", flush=True)
    sizes = {"length": LENGTH, "heads": HEADS, "dim": DIM, "threads": torch.get_num_threads()}
    return {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "sizes": sizes, "attention": attention,
            "position": position}  # fmt: skip


def with_position(encoding, mechanism, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
    turned = encoding.turn(q, k, view)
    added, rule = encoding.rule(view, LENGTH), mechanism.rule(view)
    return mechanism.mix(*turned, v, rule if added is None else rule + added, view).out


def ratio(slow: Callable[[], Tensor], fast: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> float:
    """How many times as long the first takes as the second."""
    seconds(fast, leaves), seconds(slow, leaves)
    found = [seconds(slow, leaves) / seconds(fast, leaves) for _ in range(ROUNDS)]
    return statistics.median(found)


def seconds(run: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> float:
    for leaf in leaves:
        leaf.grad = None
    began = time.perf_counter()
    run().square().mean().backward()
    return time.perf_counter() - began


def main(arguments: list[str]) -> None:
    if arguments == ["measure"]:
        torch.set_num_threads(2)
        RESULTS.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
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
