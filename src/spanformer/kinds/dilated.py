"""Spec of dilated windows."""

from spanformer.cost import pairs
from spanformer.cost.mechanisms import Cost
from spanformer.kinds.spec import INHERIT, Kind

KIND = Kind(
    "dilated",
    "`window` tokens, `step` apart",
    "spanformer.attention.dilated:DilatedWindow.build",
    params={"window": INHERIT, "step": 2},
    cost=Cost(
        "window",
        lambda n, causal, p: pairs.dilated(n, causal, p.window, p.step),
        lambda n, p: (p.window - 1) * p.step + 1,
    ),
    drawn="dilated(6, 4)",
    timed="dilated(256, 4)",
    tested=("dilated(4, 3)",),
)
