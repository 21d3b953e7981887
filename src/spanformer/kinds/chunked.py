"""Spec of full attention in chunks."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, up_to_max_span
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "chunked",
    "every token up to max_span, `queries` × `keys` pairs at a time in plain PyTorch",
    "spanformer.attention.chunked:Chunked.build",
    params={"max_span": INHERIT, "queries": 256, "keys": 1024},
    cost=Cost(
        "max_span",
        lambda n, causal, p: pairs.window(n, causal, p.max_span),
        up_to_max_span,
        stored=lambda n, d, p: min(n, p.queries) * min(n, p.keys),
        kept=lambda s, p: activations.chunked(s, p.queries, p.keys),
        alone=lambda p: True,
    ),
    drawn="chunked",
    timed="chunked",
    tested=("chunked",),
)
