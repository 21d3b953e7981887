"""docs/gallery.md: every mechanism and every position encoding with picture, equation, cost and measured time.

What stands on the page comes from the code: the equation from the file that implements it, the picture from a model of
random weights, the formula from spanformer.cost.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from spanformer.attention import ATTENTIONS
from spanformer.bench.gallery import MADE, make, model
from spanformer.core.files import write_text
from spanformer.core.progress import OnProgress, silent
from spanformer.cost.mechanisms import MECHANISMS
from spanformer.cost.positions import POSITION_COSTS
from spanformer.model.config import AttentionConfig
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.model.looking import attention_maps, seen_pairs
from spanformer.position import POSITIONS
from spanformer.report.drawing import subplots
from spanformer.report.heatmap_pictures import draw_weights
from spanformer.report.pattern_pictures import draw_pattern

SHOWN = 48
"""tokens of a picture"""

COMPOSED = {
    "mixed": 'those of each part for its heads (`spanformer cost --kinds "10 window:64 + 2 adaptive_span:1000:32"`)',
    "pattern": 'those that the pattern holds, counted (`spanformer cost --kinds "Window(256) | Global([0])"`)',
}
"""whose cost is that of what they are made of"""


def write_page(parts: dict, docs: Path, report: OnProgress = silent) -> Path:
    """Draw every picture and write the page. parts: of the result file."""
    images = docs / "img" / "gallery"
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("*.png"):
        old.unlink()
    total = len(ATTENTIONS) + len(POSITIONS)
    for number, name in enumerate(ATTENTIONS):
        report(f"drawing {name}", number, total)
        draw_attention(name, images)
    for number, name in enumerate(POSITIONS, len(ATTENTIONS)):
        report(f"drawing {name}", number, total)
        draw_position(name, images)
    write_text(docs / "gallery.md", page(parts))
    return docs / "gallery.md"


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


def draw_attention(name: str, images: Path) -> np.ndarray:
    """The picture of a mechanism; returns the pairs in it, [H, n, n]."""
    torch.manual_seed(0)
    if name == "cross":  # no layer of one text alone
        seen = np.ones((1, SHOWN, SHOWN), bool)
    else:
        mechanism = make(MADE[name][0])
        config = model(heads=mechanism.heads, head_dim=16, length=SHOWN)
        if name == "etc":  # global tokens are an encoder's
            config = replace(config, kind="encoder", attention=AttentionConfig(kind=f"etc:1:{mechanism.segment}"))
        lm = Encoder(config) if name == "etc" else LM(config)
        lm.layers()[0].attention.mechanism = mechanism
        seen = seen_pairs(lm, SHOWN * 5 // 6 if name == "etc" else SHOWN).numpy()
    causal = not bool(np.triu(seen.any(0), 1).any())
    different = list({matrix.tobytes(): matrix for matrix in seen}.values())[:3]
    figure, axes = subplots(1, len(different), width=0.35 + 2.1 * len(different), height=2.35)
    for axis, matrix in zip(axes[0], different, strict=True):
        draw_pattern(axis, matrix, causal=causal)
    figure.tight_layout(pad=0.4)
    figure.savefig(images / f"{name}.png", dpi=90)
    return seen


def draw_position(name: str, images: Path) -> None:
    """Where a head looks when all tokens are the same, so that position is all there is to go by."""
    torch.manual_seed(4)
    lm = LM(model(heads=4, head_dim=16, length=SHOWN, position=name)).double()
    with torch.no_grad():
        for p in lm.positions()[0].parameters():  # what starts at zero has no opinion yet
            p.add_(torch.randn_like(p), alpha=0.7)
        attention = lm.layers()[0].attention
        for linear in (attention.query, attention.key):
            linear.weight.mul_(2)
    (maps,) = attention_maps(lm, torch.zeros(SHOWN, dtype=torch.long))
    figure, axes = subplots(1, 2, width=4.5, height=2.35)
    for axis, weights in zip(axes[0], maps[:2].numpy(), strict=True):
        draw_weights(axis, weights / weights.max(-1, keepdims=True))
        axis.set_xticks([])
        axis.set_yticks([])
    figure.tight_layout(pad=0.4)
    figure.savefig(images / f"position-{name}.png", dpi=90)


def page(parts: dict) -> str:
    """docs/gallery.md, from the parts of a result file."""
    machine, timed = parts["attention"]["machine"], parts["attention"]["found"]["sizes"]
    results = {part: held["found"]["ratios"] for part, held in parts.items()}
    lines = [
        "# Gallery",
        "",
        "Every mechanism and every position encoding, from the code. The times:",
        "`spanformer bench gallery --out results/gallery.json`; the page: the same with `--parts page`.",
        "A picture shows which keys (columns) each query (row) sees; grey is the future. What one costs at any size:",
        "[cost](cost.md); any composition as a picture: `spanformer show`.",
        "",
        f"Times are forward and backward of the operation alone, {timed['length']:,} tokens, {timed['heads']} heads of",
        f"{timed['dim']}, float32, {machine['threads']} threads, beside PyTorch's full causal attention (SDPA) in the",
        f"same run ({machine['date'][:10]}).",
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
            lines.append(f"Measured: `{MADE[name][1]}` is {speed(found)}.")
        lines.append("")
    lines += ["## Positions", "", "Two heads of random weights over a text of equal tokens, each row relative to its",
              "largest weight: what is to be seen is position alone.", ""]  # fmt: skip
    for name, kind in POSITIONS.items():
        found = results["position"].get(name)
        lines += [*_head(name, kind, f"where {name} looks", f"position-{name}"), f"Cost: {POSITION_COSTS[name]}."]
        if found:
            lines.append(f"Measured: {found:.2f} times the time of full attention without positions.")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _head(name: str, kind: type, alt: str, image: str) -> list[str]:
    """Name, what it is, picture and equation."""
    title, equation = told(kind)
    lines = [f"### {name}", "", *textwrap.wrap(title, 120), "", f"![{alt}](img/gallery/{image}.png)", ""]
    return [*lines, "```", equation, "```", ""] if equation else lines


def speed(ratio: float) -> str:
    return f"{ratio:.1f} times as fast as SDPA" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as SDPA"
