"""Specs of hard attention: one key per query."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost, up_to_max_span
from spanformer.kinds.spec import INHERIT, Kind


def _kind(name: str, learned: str, wrap: str, timed: str) -> Kind:
    return Kind(
        name,
        f"one token up to max_span, the best, learned {learned}",
        "spanformer.attention.hard:Hard.build",
        params={"max_span": INHERIT},
        cost=Cost(
            "max_span",
            lambda n, causal, p: pairs.window(n, causal, p.max_span),
            up_to_max_span,
            kept=lambda s, p: activations.hard(s),
        ),
        drawn=name,
        timed=timed,
        tested=(name,),
        scoring=f"spanformer.attention.hard:Hard.{wrap}",
    )


KINDS = (
    _kind("hard", "straight through", "wrap", "hard(256)"),
    _kind("hard_sampled", "by the score function", "wrap_sampled", "hard_sampled(256)"),
)
