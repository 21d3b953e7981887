"""docs/gallery.md: every mechanism and every position encoding with picture, equation, cost and measured time.

The page is generated from the code: the equation from the file that implements it, the picture from a model with random
weights, and names, examples and cost from spanformer.kinds.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path

import numpy as np
import torch

from spanformer.bench.gallery import entries, model
from spanformer.core.files import write_text
from spanformer.core.progress import OnProgress, silent
from spanformer.inspect.attention_maps import attention_maps, seen_pairs
from spanformer.kinds import POSITIONS
from spanformer.kinds.notation import split_parts
from spanformer.model.encoder import Encoder
from spanformer.model.lm import LM
from spanformer.report.drawing import subplots
from spanformer.report.heatmap_pictures import draw_weights
from spanformer.report.pattern_pictures import draw_pattern

SHOWN = 48
"""tokens of a picture"""


def write_page(parts: dict, docs: Path, report: OnProgress = silent) -> Path:
    """Draw every picture and write the page. parts: the parts of the result file."""
    images = docs / "img" / "gallery"
    images.mkdir(parents=True, exist_ok=True)
    for old in images.glob("*.png"):
        old.unlink()
    total = len(entries()) + len(POSITIONS)
    for number, name in enumerate(entries()):
        report(f"drawing {name}", number, total)
        draw_attention(name, images)
    for number, name in enumerate(POSITIONS, len(entries())):
        report(f"drawing {name}", number, total)
        draw_position(name, images)
    write_text(docs / "gallery.md", page(parts))
    return docs / "gallery.md"


def about(path: str) -> tuple[str, str]:
    """(description, equations) from the header of a file. path: "module:name" of an object in it."""
    module, _, name = path.partition(":")
    text = inspect.cleandoc(importlib.import_module(module).__doc__ or "")
    paragraphs = re.split(r"\n\s*\n", text)
    formulas = [p for p in paragraphs if all(line.startswith("  ") for line in p.split("\n"))]
    if not formulas and len(paragraphs) > 1 and re.search(r"[=∝∈]", paragraphs[1].split("\n")[0]):
        formulas = [paragraphs[1]]
    before = paragraphs[: paragraphs.index(formulas[0])] if formulas else paragraphs[:1]
    title = " ".join(" ".join(before).split())
    return title, _of_one(name.partition(".")[0], "\n".join(textwrap.dedent(formula) for formula in formulas))


def _of_one(name: str, equations: str) -> str:
    """The equation of one kind, if the file has a line for each of several."""
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
    shown = entries()[name].drawn
    heads = sum(part.heads or 1 for part in split_parts(shown))
    config = model(shown, heads=heads, head_dim=16, length=SHOWN, ramp=3.0, init=0.3)
    lm = Encoder(config) if config.kind == "encoder" else LM(config)
    # an encoder of ETC shows its global tokens beside the text
    seen = seen_pairs(lm, SHOWN if config.causal else SHOWN * 5 // 6).numpy()
    causal = not bool(np.triu(seen.any(0), 1).any())
    different = list({matrix.tobytes(): matrix for matrix in seen}.values())[:3]
    figure, axes = subplots(1, len(different), width=0.35 + 2.1 * len(different), height=2.35)
    for axis, matrix in zip(axes[0], different, strict=True):
        draw_pattern(axis, matrix, causal=causal)
    figure.tight_layout(pad=0.4)
    figure.savefig(images / f"{name}.png", dpi=90)
    return seen


def draw_position(name: str, images: Path) -> None:
    """The picture of a position encoding: attention over equal tokens, which depends on position alone."""
    torch.manual_seed(4)
    lm = LM(model("full", heads=4, head_dim=16, length=SHOWN, position=name)).double()
    with torch.no_grad():
        for p in lm.positions()[0].parameters():  # parameters initialised to zero have no effect yet
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
        "Every mechanism and every position encoding, generated from the code. To measure the times:",
        "`spanformer bench gallery --out docs/results/gallery.json`; to write the page, add `--parts page`.",
        "A picture shows which keys (columns) each query (row) sees; grey is the future. For the cost at any size, see",
        "[cost](cost.md); to draw any composition, use `spanformer show`.",
        "",
        f"Times are forward and backward of the operation alone, {timed['length']:,} tokens, {timed['heads']} heads of",
        f"{timed['dim']}, float32, {machine['threads']} threads, against PyTorch's full causal attention (SDPA) in the",
        f"same run ({machine['date'][:10]}).",
        "",
        "## Mechanisms",
        "",
    ]
    for name, shown in entries().items():
        found = results["attention"].get(name)
        lines += [*_head(name, shown.about, f"what {name} sees", name), f"Drawn: `{shown.drawn}`."]
        lines.append(f"Keys a query sees: {shown.keys}.")
        if found:
            lines.append(f"Measured: `{shown.timed}` is {speed(found)}.")
        lines.append("")
    lines += ["## Positions", "", "Two heads of random weights over a text of equal tokens, each row relative to its",
              "largest weight: the picture shows the effect of position alone.", ""]  # fmt: skip
    for name, kind in POSITIONS.items():
        found = results["position"].get(name)
        lines += [*_head(name, kind.build, f"where {name} looks", f"position-{name}"), f"Cost: {kind.cost}."]
        if found:
            lines.append(f"Measured: {found:.2f} times the time of full attention without positions.")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _head(name: str, path: str, alt: str, image: str) -> list[str]:
    """Name, what it is, picture and equation."""
    title, equation = about(path)
    lines = [f"### {name}", "", *textwrap.wrap(title, 120), "", f"![{alt}](img/gallery/{image}.png)", ""]
    return [*lines, "```", equation, "```", ""] if equation else lines


def speed(ratio: float) -> str:
    return f"{ratio:.1f} times as fast as SDPA" if ratio >= 1 else f"{1 / ratio:.1f} times as slow as SDPA"
