"""All contenders of the attention benchmark, by name."""

from __future__ import annotations

from pathlib import Path

from spanformer.bench import contenders, peers, rings
from spanformer.bench.contenders import Contender

STANDARD = (
    contenders.SDPA,
    contenders.NATIVE,
    contenders.BANDED,
    contenders.SDPA_MASK,
    peers.FLEX,
    peers.X_TRANSFORMERS,
    peers.LOCAL,
    rings.RINGS_NATIVE,
    rings.RINGS_TORCH,
)
ON_DEMAND = (contenders.REFERENCE,)  # the oracle itself: timed only on request


def field(original: Path | None = None) -> dict[str, Contender]:
    """All contenders, in the order of the tables."""
    return {c.name: c for c in (*STANDARD, peers.original(original), *ON_DEMAND)}


def find(name: str, original: Path | None = None) -> Contender:
    every = field(original)
    if name not in every:
        raise ValueError(f"contender is {name!r}; expected one of {', '.join(every)}")
    return every[name]


def choose(names: tuple[str, ...], original: Path | None = None, *, leave_out: tuple[str, ...] = ()) -> list[Contender]:
    """The named contenders, by default all that are not on demand. The yardstick is always included, first."""
    every = field(original)
    if not names:
        out = (*leave_out, *(c.name for c in ON_DEMAND))
        return [c for c in every.values() if c.name not in out]
    wanted = [find(name, original) for name in dict.fromkeys(names)]
    yardstick = every[contenders.YARDSTICK]
    return [yardstick, *(c for c in wanted if c is not yardstick)]
