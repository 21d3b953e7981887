"""The whole product: every mechanism × every position × every backend, trained and read with a cache, equals the dense
float64 oracle (tests/family.py) or is refused with a reason. docs/compatibility.md is written from it:

    python tests/test_family.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch

from family import MECHANISMS, RAMP, SPAN, WINDOW, T, logits
from spanformer.model.config import AttentionConfig, FeedForwardConfig, ModelConfig, PositionConfig
from spanformer.model.kinds import KINDS, parse_layer
from spanformer.model.lm import LM

POSITIONS = get_args(get_type_hints(PositionConfig)["kind"])
BACKENDS = ("reference", "banded", "native", "flex")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
EXACT = {"reference": torch.float64, "banded": torch.float64, "native": torch.float32, "flex": torch.float32}
CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4}  # of the largest number in a tensor


def model(mechanism: str, position: str, backend: str) -> LM:
    torch.manual_seed(7)
    lm = LM(ModelConfig(
        vocab=13, dim=24, layers=1, heads=4, feedforward=FeedForwardConfig(kind="none"),
        attention=AttentionConfig(
            kind=mechanism, max_span=SPAN, ramp=RAMP, window=WINDOW, init=0.3, backend=backend, penalty=0.0
        ),
        position=PositionConfig(kind=position, length=T if position.startswith("learned") else 0, clip=5),
    )).double()  # fmt: skip
    with torch.no_grad():
        for p in lm.parameters():  # what starts at zero would hide what is behind it
            p.add_(torch.randn_like(p), alpha=0.1)
        for module in lm.spans_modules():
            module.ratio.copy_(torch.linspace(0.03, 0.71, module.kv_heads))
    return lm


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
            pieces = [lm.read(piece, cache) for piece in text().split([20, *[1] * 9, 8], 1)]
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
        for use in ("trained", "cached"):
            reason = outcome(mechanism, position, backend, use)
            known = refusal(mechanism, position, backend, use)
            assert bool(reason) == bool(known), f"{backend}, {use}: {reason or 'it works, and is said not to'}"
            assert known in reason, f"{backend}, {use}: {reason}"


def refusal(mechanism: str, position: str, backend: str, use: str) -> str:
    """A piece of the sentence that a pair is refused with; "" for one that works."""
    return ""


def table() -> str:
    lines = []
    for mechanism in MECHANISMS:
        for position in POSITIONS:
            for backend in BACKENDS:
                for use in ("trained", "cached"):
                    try:
                        said = outcome(mechanism, position, backend, use)
                    except Exception as error:
                        said = f"!! {type(error).__name__} {error}"
                    if said:
                        lines.append(f"{mechanism} | {position} | {backend} | {use} | {said[:200]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import time

    t = time.time()
    print(table())
    print(time.time() - t)
