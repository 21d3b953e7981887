"""The whole product: every mechanism × every position × every backend, trained and read with a cache, equals the dense
float64 oracle (tests/family.py) or is refused with a reason. docs/compatibility.md is written from it:

    python tests/test_family.py
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from family import MECHANISMS, RAMP, SCALED, SPAN, WINDOW, T, logits
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.kinds import KINDS, parse_layer
from spanformer.model.lm import LM

POSITIONS = (*get_args(get_type_hints(PositionConfig)["kind"]), *SCALED)
BACKENDS = ("reference", "banded", "native", "flex")
USES = ("trained", "cached")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
EXACT = {"reference": torch.float64, "banded": torch.float64, "native": torch.float32, "flex": torch.float32}
PIECES = {name: [20, *[1] * 9, 8] for name in BACKENDS} | {"flex": [34, 1, 2]}  # flex takes long for each, on a CPU
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest number in a tensor


def model(mechanism: str, position: str, backend: str) -> LM:
    torch.manual_seed(7)
    lm = LM(ModelConfig(
        vocab=13, dim=24, layers=1, heads=4, feedforward=FeedForwardConfig(kind="none"),
        attention=AttentionConfig(
            kind=mechanism, max_span=SPAN, ramp=RAMP, window=WINDOW, init=0.3, backend=backend, penalty=0.0
        ),
        position=place(position),
    )).double()  # fmt: skip
    with torch.no_grad():
        for p in lm.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.1)
        for module in lm.spans_modules():
            module.ratio.copy_(torch.linspace(0.03, 0.71, module.kv_heads))
    return lm


def place(position: str) -> PositionConfig:
    if position in SCALED:
        scaling, factor, trained = SCALED[position]
        return PositionConfig(kind="rotary", scaling=scaling, factor=factor, length=trained)
    return PositionConfig(kind=position, length=T if position.startswith("learned") else 0, clip=5)  # pyright: ignore


def text() -> torch.Tensor:
    return torch.randint(0, 13, (2, T), generator=torch.Generator().manual_seed(3))


def train(lm: LM, forward) -> dict[str, torch.Tensor]:
    """Logits and the gradients of every parameter."""
    weight = torch.randn(2, T, 13, generator=torch.Generator().manual_seed(4))
    lm.zero_grad()
    out = forward()
    (out * weight.to(out.dtype)).sum().backward()
    return {"logits": out.detach(), **{n: p.grad for n, p in lm.named_parameters() if p.grad is not None}}


def outcome(mechanism: str, position: str, backend: str, use: str) -> str:
    """ "" if it equals the oracle, else the sentence of the refusal."""
    dtype = EXACT[backend]
    lm = model(mechanism, position, backend)
    lm.eval()
    try:
        if use == "cached":
            whole = logits(lm, text(), mechanism, position).detach()
            lm = lm.to(dtype)
            cache = lm.cache(2)
            pieces = [lm.read(piece, cache) for piece in text().split(PIECES[backend], 1)]
            same({"logits": torch.cat([p for p in pieces if p is not None], 1)}, {"logits": whole})
            return ""
        wanted = train(lm, lambda: logits(lm, text(), mechanism, position))
        lm = lm.to(dtype)
        same(train(lm, lambda: lm(text()).logits), wanted)
    except ValueError as refusal:
        return str(refusal)
    return ""


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, right in wanted.items():
        if not bool(right.any()):
            continue  # a gradient that is nothing: left out, or zeros
        assert name in found, f"{name} has no gradient"
        left = found[name]
        error = (left.double() - right).abs().max() / right.abs().max()
        assert error < CLOSE[left.dtype], f"{name} is off by {float(error):.1e} of its largest number"


def test_every_kind_is_here() -> None:
    tested = {part.kind for name in MECHANISMS for part in parse_layer(name, 4)}
    assert tested - {"pattern"} == set(KINDS)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_equals_the_oracle_or_says_why_not(mechanism: str, position: str) -> None:
    for backend in BACKENDS:
        for use in USES:
            said, known = outcome(mechanism, position, backend, use), refusal(mechanism, position, backend, use)
            assert bool(said) == bool(known), f"{backend}, {use}: {said or 'it works, and is said not to'}"
            assert known in said, f"{backend}, {use}: {said}"


def refusal(mechanism: str, position: str, backend: str, use: str) -> str:
    """A piece of the sentence that a combination is refused with; "" for one that works."""
    alone = mechanism in ("additive", "chunked")
    if (alone or mechanism == "longformer:6:2") and use == "cached":
        return "mixes values in its own way, which a cache does not know"
    if mechanism == "additive":
        if position in TURNED:
            return "is no product of queries and keys"
        if position in ("table", "shaw"):
            return "distance_vec is a term of the product of query and key"
        if position == "da_transformer":
            return "distance_scale"
    if mechanism.startswith("sink_") and position in TABLES:
        return "kept is 2 beside"
    if mechanism == "expire_span" and backend == "flex":
        return "key_span is not served by flex"
    if position == "da_transformer" and backend == "native" and not alone:
        return "distance_scale is not served by the native kernel"
    if position == "shaw" and backend == "native" and use == "cached" and not laid_out(mechanism):
        return "distance_value is not served by the native kernel"
    return ""


REASONS = {
    "mixes values in its own way, which a cache does not know": (
        "It mixes values in its own way, which a cache does not know: read the text by segments."
    ),
    "is no product of queries and keys": (
        "Additive scores are no product of queries and keys, so that turned ones would not tell their distance."
    ),
    "distance_vec is a term of the product of query and key": (
        "A vector for each distance joins the product of query and key, and additive scores have none."
    ),
    "distance_scale": "Additive scores are not multiplied by distance.",
    "kept is 2 beside": (
        "Kept first tokens may be any distance away, and a table over distances ends. Learned sinks alone "
        "(`sink_window:64:0`) go with every position."
    ),
    "key_span is not served by flex": "FlexAttention does not serve spans of keys.",
    "distance_scale is not served by the native kernel": (
        "The native kernel does not multiply scores by distance; `auto` takes `banded`."
    ),
    "distance_value is not served by the native kernel": (
        "The native kernel adds no values by distance while it decodes; `auto` takes PyTorch."
    ),
}
"""by a piece of the sentence in which it is refused"""
TURNED = ("rotary", *SCALED, "transformer_xl")
TABLES = ("table", "shaw", "transformer_xl", "alibi", "t5", "distance_bias", "da_transformer")


def laid_out(mechanism: str) -> bool:
    """Whether a cache lays keys out in order for it, instead of reading its rings."""
    return any(m.placed for m in model(mechanism, "none", "reference").mechanisms())


def test_the_page_is_written_from_this() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python tests/test_family.py writes it anew"


def page() -> str:
    """docs/compatibility.md."""
    lines = [
        "# What goes with what",
        "",
        "Every kind of attention with every position encoding, trained and read with a cache, on every backend. `yes`: "
        "equal to a dense float64 oracle, values and all gradients. Otherwise the number of the reason below, with the "
        "backends it is about. Written by `python tests/test_family.py`, and held to the code by that test.",
        "",
        "| | " + " | ".join(f"`{position}`" for position in POSITIONS) + " |",
        "|---" * (len(POSITIONS) + 1) + "|",
    ]
    reasons: dict[str, int] = {}
    for mechanism in MECHANISMS:
        cells = [_cell(mechanism, position, reasons) for position in POSITIONS]
        shown = mechanism.replace("|", chr(92) + "|")
        lines.append(f"| `{shown}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {REASONS[reason]}" for reason, number in reasons.items()), ""]
    lines += [
        'A backend that refuses is passed over by `backend="auto"`, which takes the next one that can. `flex` and '
        "`native` are held to the oracle in float32, `reference` and `banded` in float64.",
    ]
    return "\n".join(lines) + "\n"


def _cell(mechanism: str, position: str, reasons: dict[str, int]) -> str:
    where: dict[str, list[tuple[str, str]]] = {}
    for use in USES:
        for backend in BACKENDS:
            if reason := refusal(mechanism, position, backend, use):
                where.setdefault(reason, []).append((backend, use))
    if not where:
        return "yes"
    parts = []
    for reason, places in where.items():
        number = reasons.setdefault(reason, len(reasons) + 1)
        uses = {use for _, use in places}
        backends = [b for b in BACKENDS if any(b == other for other, _ in places)]
        words = [] if len(backends) == len(BACKENDS) else backends
        words += [] if len(uses) == len(USES) else sorted(uses)
        parts.append(f"{number}" + (f" ({', '.join(words)})" if words else ""))
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
