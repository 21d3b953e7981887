"""Spec of exact attention within a learned span and linear attention beyond it.

A query has pairs up to span + ramp, pairs of features on the ramp and in the chunks around it, and the state's
products.
"""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import INHERIT, Kind

CHUNK = 32
"""tokens, of the kernel"""


def _far(s: Sizes, p) -> int:
    """FLOPs beyond the border: pairs of features on the ramp and its chunks, and the state."""
    beyond = s.length - min(s.length, p.span + int(p.ramp))
    near = min(s.length, int(p.ramp) + 2 * CHUNK)
    state = 2 * s.head_dim**2 * (s.heads + s.groups)
    return s.length * s.heads * 4 * s.head_dim * near + beyond * state


KIND = Kind(
    "span_linear",
    "exact within a learned span, by a sum of keys' features and values beyond it",
    "spanformer.attention.span_linear:SpanLinear.build",
    params={"max_span": INHERIT, "ramp": INHERIT, "dynamic": False},
    cost=Cost(
        "span + ramp, and a state of D·(D + 1)",
        lambda n, causal, p: pairs.window(n, causal, p.span + int(p.ramp)),
        lambda n, p: p.span + int(p.ramp),
        assumed={"span": 256},
        extra=_far,
        recurrent=lambda d, p: d * (d + 1),
        kept=lambda s, p: activations.joined(s),
    ),
    drawn="3 span_linear",
    timed="span_linear",
    tested=("span_linear", "span_linear(dynamic=true)"),
)
