"""Specs of windows and learned spans with attention sinks: a learned logit, and the text's first tokens."""

from spanformer.cost import activations, pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind

KINDS = (
    Kind(
        "sink_window",
        "the last `window` tokens, a learned sink logit, and the first `sink_tokens`",
        "spanformer.attention.sinks:Sinks.build_window",
        params={"window": INHERIT, "sink_tokens": 0},
        cost=Cost(
            "window + sink_tokens",
            lambda n, causal, p: pairs.sinks(n, causal, p.window, p.sink_tokens),
            lambda n, p: p.window + p.sink_tokens,
            kept=lambda s, p: activations.sinks(s, p.sink_tokens),
        ),
        zero=("sink_tokens",),
        drawn="sink_window(8, 2)",
        timed="sink_window(256, 4)",
        tested=("sink_window(6)", "sink_window(6, 2)"),
    ),
    Kind(
        "sink_span",
        "learned spans, a learned sink logit, and the first `sink_tokens`",
        "spanformer.attention.sinks:Sinks.build_span",
        params={"sink_tokens": 0, "max_span": INHERIT, "ramp": INHERIT},
        cost=Cost(
            "span + ramp + sink_tokens",
            lambda n, causal, p: pairs.sinks(n, causal, p.span + int(p.ramp), p.sink_tokens),
            lambda n, p: p.sink_tokens + p.span + int(p.ramp),
            assumed={"span": 256},
            kept=lambda s, p: activations.sinks(s, p.sink_tokens),
        ),
        zero=("sink_tokens",),
        drawn="2 sink_span(2)",
        timed="sink_span(4)",
        tested=("sink_span(2)",),
    ),
)
