"""Specs of full attention whose scores are not scaled dot products."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, query_maps, up_to_max_span
from spanformer.kinds.spec import INHERIT, Kind

SEEN = ("max_span", lambda n, causal, p: pairs.window(n, causal, p.max_span), up_to_max_span)
MAPPED = Cost(*SEEN, extra=query_maps, kept=lambda s, p: activations.mapped(s))
ADDITIVE = Cost(
    *SEEN,
    per_pair=6,
    extra=lambda s, p: query_maps(s, p) + s.keyed * s.head_dim,
    kept=lambda s, p: activations.additive(s),
    alone=lambda p: True,
)


def _kind(name: str, score: str, cost: Cost, drawn: str, timed: str) -> Kind:
    where = f"spanformer.attention.scoring:{name.capitalize()}"
    return Kind(
        name,
        f"every token up to max_span, scored by {score}",
        f"{where}.build",
        params={"max_span": INHERIT},
        cost=cost,
        drawn=drawn,
        timed=timed,
        tested=(name,),
        scoring=f"{where}.wrap",
    )


KINDS = (
    _kind("dot", "q·k (Luong)", Cost(*SEEN), "dot", "dot"),
    _kind("general", "q·W·k (Luong)", MAPPED, "general", "general"),
    _kind("bilinear", "(q·W + w)·k", MAPPED, "bilinear", "bilinear"),
    _kind("additive", "v·tanh(W·q + U·k) (Bahdanau)", ADDITIVE, "additive(8)", "additive(256)"),
)
