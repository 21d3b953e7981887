"""Spec of Longformer."""

from types import SimpleNamespace

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind


def _projections(s: Sizes, p: SimpleNamespace) -> int:
    """FLOPs of projecting global queries, and their keys and values: of all tokens or, if causal, of global ones."""
    g = min(p.globals, s.length)
    seen = (g if s.causal else s.length) if g else 0
    return 2 * s.dim * (g * s.dim + seen * 2 * s.groups * s.head_dim)


KIND = Kind(
    "longformer",
    "a window, `dilation` apart, and the text's first `globals` tokens global, with projections of their own",
    "spanformer.attention.longformer:Longformer.build",
    params={"window": INHERIT, "globals": 0, "dilation": 1},
    cost=Cost(
        "window + globals",
        lambda n, causal, p: pairs.longformer(n, causal, p.window, p.globals, p.dilation),
        lambda n, p: (p.window - 1) * p.dilation + 1 + p.globals,
        extra=_projections,
        kept=lambda s, p: activations.longformer(s, p.window, p.globals, p.dilation),
        alone=lambda p: p.globals > 0,
    ),
    zero=("globals",),
    drawn="longformer(8, 2)",
    timed="longformer(256, 16)",
    tested=("longformer(8)", "longformer(6, 2)"),
)
