"""Specs of heads with a matrix state that gates change: gated linear attention and the gated delta rule.

Per query head and token, chunks of c tokens cost 2·(c + 1)·D for the pairs in the chunk and 2·D² for what the state
adds; per KV head 2·D² to advance the state, and by the delta rule 2·D² + 2·(c + 1)·D more for what the state already
holds.
"""

from types import SimpleNamespace

from spanformer.cost import activations
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind

Params = SimpleNamespace
CHUNK = 64
"""tokens, of the portable path"""


def _pairs(s: Sizes) -> int:
    """FLOPs of one head and token for pairs in its chunk."""
    return 2 * (min(CHUNK, s.length) + 1) * s.head_dim


def _state(s: Sizes) -> int:
    return 2 * s.head_dim * s.head_dim


def _out_gate(s: Sizes) -> int:
    return 2 * s.length * s.dim * s.heads * s.head_dim


def _gated_linear(s: Sizes, p: Params) -> int:
    gates = 2 * s.length * p.rank * (s.dim + s.groups * s.head_dim)
    return s.length * (s.heads * (_pairs(s) + _state(s)) + s.groups * _state(s)) + gates + _out_gate(s)


def _gated_delta(s: Sizes, p: Params) -> int:
    gates = 4 * s.length * s.groups * s.dim
    conv = 2 * s.length * p.conv * (s.heads + 2 * s.groups) * s.head_dim
    work = s.heads * (_pairs(s) + _state(s)) + s.groups * (_pairs(s) + 2 * _state(s))
    return s.length * work + gates + conv + _out_gate(s)


def _convolved(d: int, p: Params) -> int:
    """Numbers of q, k or v that the convolution holds of the last tokens, of one head."""
    return max(0, p.conv - 1) * d


GATED_LINEAR = Kind(
    "gated_linear",
    "every earlier token, each channel fading by the gates between",
    "spanformer.attention.gated_linear:GatedLinear.build",
    params={"rank": 16},
    cost=Cost(
        "a state of D²",
        None,
        lambda n, p: 0,
        extra=_gated_linear,
        stored=lambda n, d, p: d * d,
        recurrent=lambda d, p: d * d,
        kept=lambda s, p: activations.gated_linear(s, p.rank),
    ),
    drawn="gated_linear",
    timed="gated_linear",
    tested=("gated_linear", "gated_linear(rank=3)"),
)
GATED_DELTA = Kind(
    "gated_delta",
    "every earlier token, each replacing what the state holds under its key",
    "spanformer.attention.gated_delta:GatedDelta.build",
    params={"conv": 4},
    zero=("conv",),
    cost=Cost(
        "a state of D²",
        None,
        lambda n, p: 0,
        extra=_gated_delta,
        stored=lambda n, d, p: d * d + 3 * _convolved(d, p),
        recurrent=lambda d, p: d * d + 2 * _convolved(d, p),
        recurrent_queries=_convolved,
        kept=lambda s, p: activations.gated_delta(s, p.conv),
    ),
    drawn="gated_delta",
    timed="gated_delta",
    tested=("gated_delta", "gated_delta(conv=0)"),
)
KINDS = (GATED_LINEAR, GATED_DELTA)
