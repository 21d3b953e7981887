"""Specs of ETC: global tokens beside a text, with shared projections or their own."""

from types import SimpleNamespace

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind

HELP = "of an encoder: `radius` tokens to either side, and a global token for each `segment` tokens (ETC)"
PARAMS = {"radius": 32, "segment": 16, "clip": 12, "hard": False}


def _pairs(n: int, causal: bool, p: SimpleNamespace) -> int:
    return pairs.etc(n, causal, p.radius, p.segment, p.clip, p.hard)


def _own_projections(s: Sizes, p: SimpleNamespace) -> int:
    """FLOPs of projecting queries, keys and values of global tokens, and keys and values of all tokens for them."""
    return 2 * s.dim * s.dim * (5 * -(-s.length // p.segment) + 2 * s.length)


KINDS = (
    Kind(
        "etc",
        HELP,
        "spanformer.attention.etc:GlobalLocal.build",
        params=PARAMS,
        cost=Cost(
            "2radius + 1 + 2n/segment + n/segment²",
            _pairs,
            None,
            kept=lambda s, p: activations.etc(s, p.radius, p.segment, p.clip, p.hard),
            alone=lambda p: True,
        ),
        zero=("radius", "clip"),
        drawn="etc(4, 5, hard=true)",
        timed="etc(128, 63)",
        absolute_positions=True,
        tested=("etc(5, 6, 3)",),
    ),
    Kind(
        "etc_projected",
        HELP + ", with projections of their own",
        "spanformer.attention.etc:GlobalLocal.build_projected",
        params=PARAMS,
        cost=Cost(
            "2radius + 1 + 2n/segment + n/segment²",
            _pairs,
            None,
            extra=_own_projections,
            kept=lambda s, p: activations.etc_projected(s, p.radius, p.segment, p.clip, p.hard),
            alone=lambda p: True,
        ),
        zero=("radius", "clip"),
        drawn="etc_projected(4, 5)",
        timed="etc_projected(128, 63)",
        absolute_positions=True,
        tested=("etc_projected(5, 6, 3, true)",),
    ),
)
