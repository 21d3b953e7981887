"""Spec of Linformer."""

from types import SimpleNamespace

from spanformer.cost.activations import Kept
from spanformer.cost.mechanisms import Cost
from spanformer.cost.sizes import Sizes
from spanformer.kinds.spec import Kind


def _summed(n: int, p: SimpleNamespace) -> int:
    """Keys that a query sees."""
    return p.rank if p.project == "learned" else -(-n // -(-p.length // p.rank))


def _projections(s: Sizes, p: SimpleNamespace) -> int:
    """FLOPs of E k and F v, or of a convolution."""
    each = {"learned": p.rank, "convolution": 1}.get(p.project, 0)
    return 2 * each * s.keyed


def _kept(s: Sizes, p: SimpleNamespace) -> Kept:
    """q, the output, the projected keys and values and, for the gradient of what projects them, k and v themselves."""
    own = s.keyed if p.project != "mean" else 0
    return Kept(2 * s.queried + own + 2 * s.groups * _summed(s.length, p) * s.head_dim, s.rows)


KIND = Kind(
    "linformer",
    "of an encoder: `rank` sums of all keys and values, of texts of up to `length` tokens",
    "spanformer.attention.linformer:Linformer.build",
    params={"rank": 64, "length": 1024, "share": "none", "project": "learned"},
    choices={
        "share": ("none", "headwise", "key_value", "layerwise"),
        "project": ("learned", "mean", "max", "convolution"),
    },
    cost=Cost(
        "rank",
        lambda n, causal, p: n * _summed(n, p),
        None,
        extra=_projections,
        kept=_kept,
        alone=lambda p: True,
    ),
    drawn="linformer(8, 48, project=mean)",
    timed="linformer(256, 4096)",
    tested=("linformer(5, 37)", "linformer(7, 40, headwise)", "linformer(6, 37, key_value)",
            "linformer(5, 37, project=mean)", "linformer(5, 37, project=max)",
            "linformer(5, 37, project=convolution)"),
)  # fmt: skip
